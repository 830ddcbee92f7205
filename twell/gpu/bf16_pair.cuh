// SPDX-License-Identifier: Apache-2.0
// Pairs of bf16 in a register, as WGMMA and mma.sync hold their operands. Of sm_80 and later.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace twell::gpu {

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float2 to_floats(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
// `low` in the lower half.
__device__ __forceinline__ uint32_t bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Pair i of eight values.
__device__ __forceinline__ uint32_t word(const uint4& values, int i) {
  return i == 0 ? values.x : i == 1 ? values.y : i == 2 ? values.z : values.w;
}
// max(0, value) of both. NaN stays NaN.
__device__ __forceinline__ uint32_t relu_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// max(0, value) of one value, in the lower half.
__device__ __forceinline__ uint32_t relu_bf16(float value) {
  return relu_bf16x2(value, 0.0f) & 0xffffu;
}
// Each half of a pair of values that are not negative, or 0 where its bits are at most `cut`; NaN
// stays. FATReLU of a ReLU.
__device__ __forceinline__ uint32_t above(uint32_t pair, uint32_t cut) {
  if (cut == 0) return pair;
  const uint32_t low = pair & 0xffffu, high = pair >> 16;
  return (low > cut ? low : 0u) | (high > cut ? high << 16 : 0u);
}
// max(0, u) where `wanted`; NaN stays.
__device__ __forceinline__ float relu_if(bool wanted, float u) {
  return wanted && u <= 0.0f ? 0.0f : u;
}
// x * factor * by in each half.
__device__ __forceinline__ uint32_t scaled(uint32_t x, uint32_t by, float factor) {
  const float2 v = to_floats(x), scale = to_floats(by);
  return bf16x2(v.x * factor * scale.x, v.y * factor * scale.y);
}
// The sum of squares of eight values.
__device__ __forceinline__ float sum_of_squares(const uint4& x) {
  float sum = 0.0f;
  for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
    const float2 v = to_floats(pair);
    sum = fmaf(v.x, v.x, fmaf(v.y, v.y, sum));
  }
  return sum;
}

// The same value, unknown to the compiler, which therefore does not hoist what is computed from it
// out of a loop into registers that the loop cannot spare.
template <typename T>
__device__ __forceinline__ T opaque(T value) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace twell::gpu
