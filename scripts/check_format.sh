#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every source file is formatted by clang-format 14.0.6 (pinned: other versions differ) and opens
# with its licence line. `scripts/check_format.sh --fix` formats in place.
set -euo pipefail
cd "$(dirname "$0")/.."

version=14.0.6
clang_format=clang-format
if ! clang-format --version 2>/dev/null | grep -q "version $version"; then
  clang_format=.tools/venv/bin/clang-format
  if [[ ! -x $clang_format ]]; then
    python3 -m venv .tools/venv
    .tools/venv/bin/pip install --quiet "clang-format==$version"
  fi
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
