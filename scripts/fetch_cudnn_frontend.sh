#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the headers of cudnn-frontend (MIT licence), pinned by version and checksum, into
# .cache/cudnn-frontend/include. They are optional: without them the build leaves cuDNN out.
set -euo pipefail
cd "$(dirname "$0")/.."

version=1.18.0
target=.cache/cudnn-frontend
[[ -f $target/version && $(cat "$target/version") == "$version" ]] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# Any wheel of this version works, because its headers are the same for every platform.
"$work/venv/bin/pip" download --quiet --no-deps --only-binary=:all: --dest "$work" \
  --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
  "nvidia-cudnn-frontend==$version"
echo "382ea063b92cbfd5b442cb75ff8422932d78276aecf139e46713ed1ad3d07af4  $(ls "$work"/*.whl)" | sha256sum --check --quiet
mkdir -p .cache
rm -rf "$target.new"
"$work/venv/bin/python" - "$work"/*.whl "$target.new" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(
        sys.argv[2], [name for name in wheel.namelist() if name.startswith("include/")]
    )
PYTHON
echo "$version" >"$target.new/version"
rm -rf "$target"
mv "$target.new" "$target"
