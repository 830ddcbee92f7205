#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzz targets with clang's libFuzzer and runs each for a while (default 60 seconds) from
# its committed corpus. New inputs go to build/fuzz/corpus; a finding stops with its input's name.
#   scripts/fuzz.sh [SECONDS [TARGET...]]
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
[[ $# -gt 0 ]] && shift
scripts/setup.sh --fuzz
targets=("$@")
if [[ ${#targets[@]} == 0 ]]; then
  mapfile -t targets < <(find twell cli -name '*_fuzz.cc' -exec basename {} .cc \; | sort)
fi
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target "${targets[@]}"
for target in "${targets[@]}"; do
  name=${target%_fuzz}
  echo "== $target, $seconds s"
  mkdir -p "build/fuzz/corpus/$name"
  ASAN_OPTIONS=detect_leaks=0 "build/fuzz/twell/$target" -max_total_time="$seconds" \
    -rss_limit_mb=4096 -print_final_stats=1 "build/fuzz/corpus/$name" "tests/fuzz/$name"
done
