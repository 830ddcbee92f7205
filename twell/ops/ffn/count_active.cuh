// SPDX-License-Identifier: Apache-2.0
// What the kernels of a dense layer count beside their work. Internal to ops/ffn.
#pragma once

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell {

// Sums what each thread of a CTA has counted of one token. Either place may be null; all threads
// call it.
__device__ inline void count_active(int count, int64_t row, int32_t* row_nnz,
                                    ActivityCuda* counts) {
  if (row_nnz == nullptr && counts == nullptr) return;
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (row_nnz != nullptr) row_nnz[row] = total;
  if (counts != nullptr) {
    atomicAdd(&counts->tokens, 1ull);
    atomicAdd(&counts->nnz, static_cast<unsigned long long>(total));
    atomicMax(&counts->max_row_nnz, static_cast<unsigned long long>(total));
  }
}

}  // namespace twell
