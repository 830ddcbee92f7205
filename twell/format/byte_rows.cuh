// SPDX-License-Identifier: Apache-2.0
// Device code of byte_matrix.h's quantiser, for every kernel that writes rows in 8 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "twell/format/byte_matrix.h"

namespace twell::byte_rows {

// Four values times `inverse`, to nearest even; NaN stays NaN in e4m3.
template <ByteType kType>
__device__ __forceinline__ uint32_t quantise4(float a, float b, float c, float d, float inverse) {
  if constexpr (kType == ByteType::kE4M3) {
    const auto pair = [&](float x, float y) {
      return static_cast<uint32_t>(
          __nv_cvt_float2_to_fp8x2({x * inverse, y * inverse}, __NV_SATFINITE, __NV_E4M3));
    };
    return pair(a, b) | pair(c, d) << 16;
  } else {
    const auto byte = [&](float x) {
      return static_cast<uint32_t>(max(min(__float2int_rn(x * inverse), 127), -127)) & 0xffu;
    };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
  }
}

// Two e4m3 values, bits 0-7 and 8-15 of `bytes`, as a pair of bf16 bits. Exact.
__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2(uint16_t bytes) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3);
  const float2 pair = __half22float2(__half2(halves));
  const __nv_bfloat162 out = __floats2bfloat162_rn(pair.x, pair.y);
  return *reinterpret_cast<const uint32_t*>(&out);
}

}  // namespace twell::byte_rows
