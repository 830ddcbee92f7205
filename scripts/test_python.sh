#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel of the Python package from the objects of build/release, installs it into a clean
# virtual environment, and runs its tests on the CPU.
#   scripts/test_python.sh             all of it
#   scripts/test_python.sh --install   only downloads what is missing
#   scripts/test_python.sh --build     only that, and builds and installs the wheel
#   scripts/test_python.sh --run       only the tests, of the wheel that --build installed
# PyTorch, transformers and lm-eval are installed once, into .cache/python: where there is a CUDA
# toolkit, 0.8 GB of wheels, because PyTorch then finds most of CUDA's libraries there; elsewhere
# PyTorch brings them, 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=$PWD/.cache/python
python=$cache/bin/python
clean=$PWD/build/python_clean
# Where this is set, every process compiles all of PyTorch's files that it imports.
unset PYTHONDONTWRITEBYTECODE
run() {
  "$clean/bin/python" -m twell.doctor
  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 exec "$clean/bin/python" -m pytest -q -p no:cacheprovider \
    --durations=5 python/tests
}
[[ ${1:-} != --run ]] || run
torch=(
  torch==2.11.0 nvidia-cufile==1.15.1.6 nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5
)
needs_of_torch=(filelock typing-extensions sympy networkx jinja2 fsspec 'setuptools<82' mpmath)
# Accelerate requires torch, which would bring all of CUDA's libraries again, and kernels a dozen
# packages that check signatures of downloads. They come last: setuptools imports kernels whenever a
# package is built from source, and kernels imports what transformers brings.
without_needs=(accelerate==1.11.0 kernels==0.17.2)
# No Ninja: that of PyPI writes another log than the system's, so either would build all anew.
others=(
  transformers==5.17.0 lm_eval==0.4.13 psutil numpy pytest==8.4.2 matplotlib==3.10.7 mypy==2.4.1
  scikit-build-core==0.11.6 nanobind==3.1.0 nanobind-backend==1.0.0 tomlkit==0.13.3
)
wanted="${torch[*]} ${needs_of_torch[*]} ${without_needs[*]} ${others[*]}"
# Without --no-compile, pip compiles all of PyTorch's and transformers' files, of which few are used.
pip=("$python" -m pip install --quiet --no-compile)
# Keeps what is installed already.
install() {
  python3 -m venv "$cache" &&
    "${pip[@]}" --retries 1 "${needs_of_torch[@]}" &&
    "${pip[@]}" --no-deps "${torch[@]}" &&
    { "$python" -c 'import torch' 2>/dev/null || "${pip[@]}" torch==2.11.0; } &&
    "${pip[@]}" "${others[@]}" &&
    "${pip[@]}" --no-deps "${without_needs[@]}" &&
    echo "$wanted" >"$cache/complete"
}
if [[ $(cat "$cache/complete" 2>/dev/null) != "$wanted" ]]; then
  echo "test_python: installing PyTorch, transformers and lm-eval into .cache/python"
  install || {
    rm -rf "$cache"
    install
  } || {
    echo "test_python: they cannot be installed, so the Python package is not tested" >&2
    exit 1
  }
fi
[[ ${1:-} != --install ]] || exit 0

"$python" -m pip wheel --quiet --no-build-isolation --no-deps --no-index --wheel-dir build/wheels \
  -Cbuild-dir=build/release -Ccmake.define.Python_EXECUTABLE="$python" .
cmake --build build/release --target twell_hub_cpu >/dev/null

rm -rf "$clean"
python3 -m venv "$clean"
"$python" -c 'import site; print(site.getsitepackages()[0])' \
  >"$("$clean/bin/python" -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
"$clean/bin/python" -m pip install --quiet --no-deps --no-index build/wheels/twell-*.whl
[[ ${1:-} == --build ]] || run
