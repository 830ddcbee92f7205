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
  libcpp-httplib-dev
)
cuda=0
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  cuda=1
  packages+=(python3 python3-venv)
fi
option=${1:-}
clang=(clang libclang-rt-dev libomp-dev)
if [[ $option == --fuzz ]]; then
  packages+=("${clang[@]}")
elif [[ $option == --test ]]; then
  packages+=("${clang[@]}" libgtest-dev libgmock-dev iproute2 python3 python3-venv clang-format-14 git)
  # Ubuntu has Chromium as a snap only, which containers cannot install; its test is skipped there.
  ! grep -q '^ID=debian' /etc/os-release || packages+=(chromium)
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
fetch() {
  [[ $cuda == 0 ]] || "$(dirname "$0")/fetch_cudnn_frontend.sh" ||
    echo "setup: cudnn-frontend could not be fetched; building without cuDNN" >&2
  [[ $option != --test ]] || openai_client ||
    echo "setup: the openai client could not be fetched; tests of the server are skipped" >&2
}
# The client that tests the server: pinned packages of PyPI in a virtual environment.
openai_client() {
  local root folder
  root=$(cd "$(dirname "$0")/.." && pwd)
  folder=$root/.cache/openai-client
  cmp -s "$root/tests/serve_requirements.txt" "$folder/installed" && return
  rm -rf "$folder"
  python3 -m venv "$folder" &&
    "$folder/bin/pip" install -q --disable-pip-version-check --no-deps \
      -r "$root/tests/serve_requirements.txt" &&
    cp "$root/tests/serve_requirements.txt" "$folder/installed"
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
