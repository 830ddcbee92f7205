// SPDX-License-Identifier: Apache-2.0
// Pairs of f16 in a register, and e4m3 values as such pairs, as mma.sync takes them. f16 holds
// every e4m3 value exactly; bf16 values need a factor that brings them into its range.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "twell/gpu/bf16_pair.cuh"

namespace twell::gpu {

// d [16, 8] += a [16, 16] b [16, 8], f16 in, f32 out.
__device__ __forceinline__ void mma_16x8x16_f16(float (&d)[4], uint32_t a0, uint32_t a1,
                                                uint32_t a2, uint32_t a3, uint32_t b0,
                                                uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four e4m3 values, the first one in the lowest byte, as two pairs. Of sm_89 and later.
__device__ __forceinline__ uint2 e4m3_to_halves(uint32_t bytes) {
  uint2 pairs;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(bytes));
  return pairs;
}
__device__ __forceinline__ uint4 e4m3_to_halves(uint32_t first, uint32_t second) {
  const uint2 a = e4m3_to_halves(first), b = e4m3_to_halves(second);
  return {a.x, a.y, b.x, b.y};
}
__device__ __forceinline__ float2 halves_to_floats(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The larger magnitude of a pair of bf16, as bits, which are in the order of magnitudes: NaN is the
// largest.
__device__ __forceinline__ uint32_t most_bits(uint32_t pair) {
  return max(pair & 0x7fffu, pair >> 16 & 0x7fffu);
}

// The power of two that brings values of up to this magnitude (bf16 bits) just below 2^15, and its
// inverse. Values 2^-29 times as large are still exact in f16.
struct HalfScale {
  float factor, inverse;
  __device__ __forceinline__ explicit HalfScale(uint32_t most) {
    const int exponent = static_cast<int>(most >> 7);  // the magnitude is below 2^(exponent - 126)
    const int biased = min(127 + 15 + 126 - exponent, 240);
    factor = __uint_as_float(static_cast<uint32_t>(biased) << 23);
    inverse = __uint_as_float(static_cast<uint32_t>(254 - biased) << 23);
  }
  // Both values of a pair of bf16, times the factor.
  __device__ __forceinline__ uint32_t halves(uint32_t pair) const {
    const float2 v = to_floats(pair);
    uint32_t out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(v.y * factor), "f"(v.x * factor));
    return out;
  }
};

}  // namespace twell::gpu
