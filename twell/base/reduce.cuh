// SPDX-License-Identifier: Apache-2.0
// Reductions over a warp, by exchanging values across lanes: every lane gets the same bits, and the
// order of additions is fixed. All 32 lanes must call.
#pragma once

#include <cuda_runtime.h>

namespace twell {

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Sums both values.
__device__ __forceinline__ float2 warp_sum(float2 value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  }
  return value;
}

// Maximum of integers or floats; a NaN loses against any number.
template <typename T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

}  // namespace twell
