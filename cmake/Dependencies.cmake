# SPDX-License-Identifier: Apache-2.0
# Every third-party library, found once, with one target each.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(PkgConfig REQUIRED)
find_package(ZLIB REQUIRED)
pkg_check_modules(lzma REQUIRED IMPORTED_TARGET liblzma)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(dnnl REQUIRED)

# CUDA is optional: without a toolkit the CPU build is complete.
set(TWELL_HAVE_CUDA OFF)
if(NOT TWELL_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Architectures are given per room: sm_90a for the Hopper kernels, sm_80 for the portable path.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    # As a flag, because CMake 3.22 (Ubuntu 22.04) does not know CUDA_STANDARD 20.
    set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -std=c++20")
    find_package(CUDAToolkit 12.3 REQUIRED)
    set(TWELL_HAVE_CUDA ON)
  elseif(TWELL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TWELL_CUDA=ON, but no CUDA compiler was found (set CMAKE_CUDA_COMPILER)")
  endif()
endif()
message(STATUS "TwELL: CUDA backend ${TWELL_HAVE_CUDA}")
