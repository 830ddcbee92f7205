#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every source file is formatted by clang-format 14 (other versions differ), which scripts/setup.sh
# --test installs, and opens with its licence line.
# `scripts/check_format.sh --fix` formats in place.
set -euo pipefail
cd "$(dirname "$0")/.."

version=14
clang_format=
for candidate in "clang-format-$version" clang-format .cache/clang-format/bin/clang-format; do
  if "$candidate" --version 2>/dev/null | grep -q "version $version\."; then
    clang_format=$candidate
    break
  fi
done
if [[ -z $clang_format ]]; then
  echo "check_format: clang-format $version not found: install the package clang-format-$version, or" \
    "clang-format==$version.0.6 of PyPI" >&2
  exit 2
fi

mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh')
if [[ ${1:-} == --fix ]]; then
  "$clang_format" -i "${sources[@]}"
  exit 0
fi

failed=0
"$clang_format" --dry-run --Werror "${sources[@]}" || failed=1
mapfile -t all < <(git ls-files --cached --others --exclude-standard \
  '*.h' '*.cc' '*.cu' '*.cuh' '*.cmake' '*CMakeLists.txt' '*.sh' '*.py' '.ci/run')
for file in "${all[@]}"; do
  head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || {
    echo "$file: no licence line (SPDX-License-Identifier: Apache-2.0)" >&2
    failed=1
  }
done
exit $failed
