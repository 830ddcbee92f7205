#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What Ubuntu 22.04 lacks or has too old, pinned by version and checksum, into .cache/libraries,
# where CMake looks first: Highway 1.0.7 (Apache-2.0), built, and the headers of toml++ 3.4.0 (MIT).
# Both are as Ubuntu 24.04 has them. Needs cmake, ninja, a compiler and xz.
set -euo pipefail
cd "$(dirname "$0")/.."

version="highway 1.0.7, toml++ 3.4.0"
target=.cache/libraries
[[ -f $target/version && $(cat "$target/version") == "$version" ]] && exit 0

archive=http://archive.ubuntu.com/ubuntu/pool/universe
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { # path in the archive, sha256, folder to unpack into
  /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User=root download-file "$archive/$1" \
    "$work/$3.tar" "SHA256:$2"
  mkdir "$work/$3"
  tar -xf "$work/$3.tar" --strip-components=1 -C "$work/$3"
}
fetch h/highway/highway_1.0.7.orig.tar.gz \
  5434488108186c170a5e2fca5e3c9b6ef59a1caa4d520b008a9b8be6b8abe6c5 highway
fetch t/tomlplusplus/tomlplusplus_3.4.0+ds.orig.tar.xz \
  0ae736e13a49cc8a0aa7799705cf18bd93f5f56624613e6aa554b65fe2d72768 tomlplusplus

mkdir -p .cache
rm -rf "$target.new"
cmake -G Ninja -S "$work/highway" -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_INSTALL_PREFIX="$PWD/$target" -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF \
  -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_TESTING=OFF -DHWY_ENABLE_EXAMPLES=OFF \
  -DHWY_ENABLE_CONTRIB=OFF -DHWY_ENABLE_TESTS=OFF >/dev/null
cmake --build "$work/build" >/dev/null
# The prefix is where it will be; the files go beside it until all are there.
DESTDIR="$work/installed" cmake --install "$work/build" >/dev/null
mv "$work/installed$PWD/$target" "$target.new"
cp -r "$work/tomlplusplus/include/toml++" "$target.new/include/"
echo "$version" >"$target.new/version"
rm -rf "$target"
mv "$target.new" "$target"
