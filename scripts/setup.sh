#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what a build needs from the distribution (Debian 12 and 13, Ubuntu 24.04).
#   scripts/setup.sh          build tools and libraries
#   scripts/setup.sh --test   these, and what the tests and checks need
#   scripts/setup.sh --test-build   of this only what is needed to build tests, for scripts/test.sh, which
#                             installs the rest beside the build
#   scripts/setup.sh --fuzz   these, and what the fuzz targets need
# The sources of XGrammar go into .cache/ and, where there is a CUDA toolkit, the headers of
# cudnn-frontend.
# Does nothing, and needs no network, when everything is there already.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

packages=(
  g++ cmake ninja-build pkg-config
  libdnnl-dev libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev
  libpcre2-dev libutf8proc-dev libzstd-dev liblzma-dev libsnappy-dev libxxhash-dev zlib1g-dev libgloo-dev
  libboost-dev python3 python3-venv
)
cuda=0
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  cuda=1
fi
option=${1:-}
clang=(clang lld libclang-rt-dev libomp-dev)
if [[ $option == --fuzz ]]; then
  packages+=("${clang[@]}")
elif [[ $option == --test || $option == --test-build ]]; then
  packages+=("${clang[@]}" libgtest-dev libgmock-dev python3-dev git ccache)
  # The release of Debian, or 0. Ubuntu has Chromium as a snap only, which containers cannot install,
  # so its test is skipped there. Debian 13 has no clang-format 14, which comes from PyPI instead.
  debian=$(. /etc/os-release && [[ $ID == debian ]] && echo "${VERSION_ID:-99}" || echo 0)
  [[ $debian -ge 13 ]] || packages+=(clang-format-14)
  if [[ $option == --test ]]; then
    packages+=(iproute2 nginx-light)
    [[ $debian == 0 ]] || packages+=(chromium)
  fi
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
fetch() {
  "$root/scripts/fetch_xgrammar.sh" ||
    echo "setup: XGrammar could not be fetched; building without grammars and JSON schemas" >&2
  [[ $cuda == 0 ]] || "$root/scripts/fetch_cudnn_frontend.sh" ||
    echo "setup: cudnn-frontend could not be fetched; building without cuDNN" >&2
  [[ $option == --test* && $debian -ge 13 ]] && { python_packages clang-format clang-format==14.0.6 ||
    echo "setup: clang-format 14 could not be fetched" >&2; }
  [[ $option == --test ]] || return 0
  local client
  mapfile -t client < <(grep -v '^#' "$root/tests/serve_requirements.txt")
  python_packages openai-client "${client[@]}" ||
    echo "setup: the openai client could not be fetched; tests of the server are skipped" >&2
  [[ $cuda == 0 ]] || command -v cuobjdump >/dev/null || [[ -x /usr/local/cuda/bin/cuobjdump ]] ||
    python_packages cuobjdump nvidia-cuda-cuobjdump==13.5.37 ||
    echo "setup: cuobjdump could not be fetched; spilled registers are not checked" >&2
}
# python_packages FOLDER PACKAGE==VERSION...: these of PyPI in the virtual environment .cache/FOLDER.
python_packages() {
  local folder=$root/.cache/$1
  shift
  [[ $(cat "$folder/installed" 2>/dev/null) != "$*" ]] || return 0
  rm -rf "$folder"
  python3 -m venv "$folder" &&
    "$folder/bin/pip" install -q --disable-pip-version-check --no-deps "$@" &&
    echo "$*" >"$folder/installed"
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
  --no-install-recommends "${missing[@]}" >/dev/null
fetch
