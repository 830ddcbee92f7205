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

# step NAME: begins a step; at the end, and where a step fails, the seconds that each took.
took=()
step() {
  took+=("$SECONDS $*")
  printf '\n== %s\n' "$*"
}
show_times() {
  local i end
  printf '\n== seconds of each step\n'
  for i in "${!took[@]}"; do
    end=$SECONDS
    [[ $((i + 1)) == "${#took[@]}" ]] || end=${took[i + 1]%% *}
    printf '%6d  %s\n' $((end - ${took[i]%% *})) "${took[i]#* }"
  done
  printf '%6d  in all\n' "$SECONDS"
}
trap show_times EXIT

step "dependencies of the builds"
scripts/setup.sh --test-build

if [[ $python == 1 ]]; then
  step "Python package"
  exec scripts/test_python.sh
fi

step "formatting and include directions"
scripts/check_format.sh
python3 scripts/check_includes.py

# later NAME COMMAND...: runs it beside what follows, its output into build/NAME.log.
# result NAME: waits for it, shows its output, and fails if it failed.
declare -A running=()
trap 'kill "${running[@]}" 2>/dev/null || true; show_times' EXIT
later() {
  mkdir -p build
  "${@:2}" >"build/$1.log" 2>&1 &
  running[$1]=$!
}
result() {
  local status=0
  wait "${running[$1]}" || status=$?
  unset "running[$1]"
  cat "build/$1.log"
  return $status
}

# Chromium, nginx and the openai client install while the first build compiles.
later setup scripts/setup.sh --test

# One test program per processor; each also uses as many threads as it likes. Tests run while the
# next build compiles, so that no processor waits for the longest of them.
jobs=$(nproc)

if [[ $quick == 0 ]]; then
  step "sanitizer build: AddressSanitizer and UndefinedBehaviorSanitizer (PyTorch downloads meanwhile)"
  later python_install scripts/test_python.sh --install
  # Without the preset's -g1 the build takes a seventh less; reports then name functions, but no lines.
  cmake --preset asan -DCMAKE_CXX_FLAGS_SANITIZE=-O1 >/dev/null
  cmake --build --preset asan
  result setup
  later asan_tests ctest --test-dir build/asan --output-on-failure -j "$jobs"
fi

step "release build: the library, warnings as errors"
# XGrammar is compiled once: the sanitizer build's library, which has no sanitizers in it.
xgrammar=
if [[ $quick == 0 && -e build/asan/libxgrammar.a ]]; then
  xgrammar=$PWD/build/asan/libxgrammar.a
fi
no_gpu=OFF
[[ -e /dev/nvidiactl ]] || no_gpu=ON
cmake --preset dev -DTWELL_PYTHON=OFF -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 \
  -DTWELL_NO_GPU=$no_gpu -DTWELL_XGRAMMAR_LIBRARY="$xgrammar" >/dev/null
# Low priority, because tests under sanitizers run beside it, some of which measure time.
nice cmake --build --preset dev --target twell_library

if [[ $quick == 0 ]]; then
  step "Python package"
  if result python_install || scripts/test_python.sh --install; then
    nice scripts/test_python.sh --build
    later python_tests scripts/test_python.sh --run
  fi
fi

step "release build: the command line, tests of vector code and of GPU code"
nice cmake --build --preset dev --target twell twell_release_tests
[[ $quick == 0 ]] || result setup
if [[ -n $(find build/release/library -name '*.cu.o' -print -quit) ]]; then
  step "kernels keep their values in registers"
  # Exit status 2: no cuobjdump.
  python3 scripts/check_spills.py build/release || [[ $? == 2 ]]
fi

if [[ $quick == 0 ]]; then
  step "CPU tests under AddressSanitizer and UndefinedBehaviorSanitizer"
  result asan_tests
fi

step "tests of the release build"
ctest --test-dir build/release --label-regex 'simd|cli|gpu' --output-on-failure -j "$jobs"

if [[ -n ${running[python_tests]:-} ]]; then
  step "tests of the Python package"
  result python_tests
fi
