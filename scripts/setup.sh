#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what a build needs from the distribution (Debian 12 and 13, Ubuntu 24.04).
#   scripts/setup.sh          build tools and libraries
#   scripts/setup.sh --test   these, and what the tests and checks need
#   scripts/setup.sh --fuzz   these, and what the fuzz targets need
# Where there is a CUDA toolkit, the headers of cudnn-frontend go into .cache/.
# Does nothing, and needs no network, when everything is there already.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config
  libdnnl-dev libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev
  libpcre2-dev libutf8proc-dev libzstd-dev liblzma-dev libsnappy-dev libxxhash-dev zlib1g-dev libgloo-dev
)
cuda=0
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  cuda=1
  packages+=(python3 python3-venv)
fi
recommends=--no-install-recommends
if [[ ${1:-} == --fuzz ]]; then
  packages+=(clang libomp-dev)
  recommends=--install-recommends  # clang's sanitizer runtime is one, or part of clang
elif [[ ${1:-} == --test ]]; then
  packages+=(libgtest-dev libgmock-dev python3 clang-format-14 git)
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
fetch() {
  [[ $cuda == 0 ]] || "$(dirname "$0")/fetch_cudnn_frontend.sh" ||
    echo "setup: cudnn-frontend could not be fetched; building without cuDNN" >&2
}
if [[ ${#missing[@]} == 0 ]]; then
  fetch
  exit 0
fi

if ! command -v apt-get >/dev/null; then
  echo "setup: apt-get not found; please install the equivalents of: ${missing[*]}" >&2
  exit 2
fi
as_root=()
if [[ $(id -u) != 0 ]]; then
  command -v sudo >/dev/null || {
    echo "setup: these packages are missing and this user cannot install them: ${missing[*]}" >&2
    exit 2
  }
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
  "$recommends" "${missing[@]}" >/dev/null
fetch
