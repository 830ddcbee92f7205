// SPDX-License-Identifier: Apache-2.0
// split_weight.h for the vector types that kernels hold.
#pragma once

#include <cuda_bf16.h>

#include "twell/ops/adamw/split_weight.h"

namespace twell {

__device__ __forceinline__ float join(__nv_bfloat16 upper, int16_t rest) {
  return __uint_as_float(join_weight({__bfloat16_as_ushort(upper), rest}));
}
__device__ __forceinline__ void split(float value, __nv_bfloat16& upper, int16_t& rest) {
  const SplitWeight halves = split_weight(__float_as_uint(value));
  upper = __ushort_as_bfloat16(halves.bf16);
  rest = halves.rest;
}

}  // namespace twell
