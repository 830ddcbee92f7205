// SPDX-License-Identifier: Apache-2.0
// stmatrix: warp-level stores of 8 x 8 matrices to shared memory, of sm_90.
#pragma once

#include <cstdint>

namespace twell::gpu {

// Stores four 8 x 8 matrices of 16-bit values, held as the accumulators of a product hold
// them; lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t r0, uint32_t r1,
                                               uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same, each matrix transposed: lanes 8i .. 8i + 7 give the addresses of its columns.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t r0,
                                                          uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

}  // namespace twell::gpu
