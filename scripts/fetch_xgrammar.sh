#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the C++ sources of XGrammar (Apache-2.0 licence), pinned by version and checksum, into
# .cache/xgrammar. They are optional: without them the build refuses grammars and JSON schemas.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.2.8
target=.cache/xgrammar
[[ -f $target/version && $(cat "$target/version") == "$version" ]] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# pip asks a source package for its metadata, which these backends give; nothing is built.
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
  scikit-build-core==0.11.6 setuptools-scm==8.3.1
"$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary=:all: \
  --no-build-isolation --dest "$work" "xgrammar==$version"
echo "8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80  $work/xgrammar-$version.tar.gz" |
  sha256sum --check --quiet
mkdir -p .cache "$work/sources"
# The core, without the bindings of other languages, with the headers it includes.
tar -xzf "$work/xgrammar-$version.tar.gz" -C "$work/sources" --strip-components=1 \
  "xgrammar-$version"/{LICENSE,NOTICE,cpp,include} \
  "xgrammar-$version"/3rdparty/{picojson,dlpack/LICENSE,dlpack/include}
rm -rf "$work/sources/cpp/tvm_ffi" "$target" "$target.new"
echo "$version" >"$work/sources/version"
mv "$work/sources" "$target.new"
mv "$target.new" "$target"
