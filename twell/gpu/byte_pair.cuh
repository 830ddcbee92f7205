// SPDX-License-Identifier: Apache-2.0
// Pairs of signed bytes as pairs of bf16, which hold them exactly.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace twell::gpu {

// Bytes 2 i and 2 i + 1 of four.
__device__ __forceinline__ uint32_t bytes_to_bf16x2(uint32_t bytes, int i) {
  // 0x4300 is 128 in bf16, whose last place is then 1: with the lower 7 bits of a value it is 128
  // more than these. With the sign bit it is 256, and without 128.
  const uint32_t biased = __byte_perm(bytes, 0x43434343u, i == 0 ? 0x4140 : 0x4342);
  const uint32_t low = biased & 0xff7fff7fu, bias = biased & 0xff80ff80u;
  const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                      *reinterpret_cast<const __nv_bfloat162*>(&bias));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace twell::gpu
