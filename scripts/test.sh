#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what it needs, checks the sources, builds, and runs every test this machine can run.
#   scripts/test.sh            checks, CPU tests under sanitizers, release build and its tests, the
#                              Python package (downloads PyTorch once: 0.8 to 3 GB)
#   scripts/test.sh --quick    without the sanitizers
#   scripts/test.sh --python   the Python package's tests alone
# CUDA code is compiled where a CUDA toolkit is found; its tests run where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=0
python=0
case ${1:-} in
  "") ;;
  --quick) quick=1 ;;
  --python) python=1 ;;
  *)
    echo "test: unknown option $1 (only --quick, --python)" >&2
    exit 2
    ;;
esac

step() { printf '\n== %s\n' "$*"; }

step "dependencies"
scripts/setup.sh --test

if [[ $python == 1 ]]; then
  step "Python package"
  exec scripts/test_python.sh
fi

step "formatting and include directions"
scripts/check_format.sh
python3 scripts/check_includes.py

# One test program per processor; each also uses as many threads as it likes.
jobs=$(nproc)

if [[ $quick == 0 ]]; then
  step "CPU tests under AddressSanitizer and UndefinedBehaviorSanitizer (PyTorch downloads meanwhile)"
  scripts/test_python.sh --install &
  trap 'kill %1 2>/dev/null || true' EXIT
  cmake --preset asan >/dev/null
  cmake --build --preset asan
  ctest --test-dir build/asan --output-on-failure -j "$jobs"
fi

step "release build: the command line, tests of vector code and of GPU code, warnings as errors"
cmake --preset dev -DTWELL_PYTHON=OFF -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 \
  >/dev/null
cmake --build --preset dev --target twell twell_release_tests

step "tests of the release build"
ctest --test-dir build/release --label-regex 'simd|cli|gpu' --output-on-failure -j "$jobs"

if [[ $quick == 0 ]]; then
  step "Python package"
  wait  # for the downloads; what failed is tried again
  scripts/test_python.sh --if-possible
fi
