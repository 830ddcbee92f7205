#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what it needs, checks the sources, builds, and runs every test this machine can run.
#   scripts/test.sh            checks, sanitizer build of the fast tests, full build and all tests
#   scripts/test.sh --quick    without the sanitizer build
# CUDA code is compiled where a CUDA toolkit is found; its tests run where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=0
case ${1:-} in
  "") ;;
  --quick) quick=1 ;;
  *)
    echo "test: unknown option $1 (only --quick)" >&2
    exit 2
    ;;
esac

step() { printf '\n== %s\n' "$*"; }

step "dependencies"
scripts/setup.sh --test

step "formatting and include directions"
scripts/check_format.sh
python3 scripts/check_includes.py

if [[ $quick == 0 ]]; then
  step "fast tests under AddressSanitizer and UndefinedBehaviorSanitizer"
  cmake --preset asan >/dev/null
  cmake --build --preset asan
  # OpenMP's thread pool and oneDNN's caches live until exit: no leak checking of those.
  ASAN_OPTIONS=detect_leaks=0 ctest --test-dir build/asan --label-regex '^cpu$' \
    --output-on-failure
fi

step "release build of the command line"
cmake --preset release >/dev/null
cmake --build --preset release

step "tests"
cmake --preset dev >/dev/null
cmake --build --preset dev
ctest --test-dir build/dev --output-on-failure
