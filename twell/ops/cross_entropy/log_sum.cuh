// SPDX-License-Identifier: Apache-2.0
// logsumexp in one pass: partial sums of exponentials that carry their maximum.
#pragma once

#include <cuda_runtime.h>

namespace twell {

// Largest of what was seen, and the sum of exponentials relative to it.
struct LogSum {
  float top = -INFINITY;
  float sum = 0.0f;

  __device__ void add(float other_top, float other_sum) {
    const float new_top = fmaxf(top, other_top);
    if (new_top == -INFINITY) return;
    sum = sum * expf(top - new_top) + other_sum * expf(other_top - new_top);
    top = new_top;
  }
};

// Over the block, the same bits in every thread.
template <int kThreads>
__device__ LogSum block_log_sum(LogSum mine) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float tops[kWarps], sums[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float top = __shfl_xor_sync(0xffffffffu, mine.top, offset);
    const float sum = __shfl_xor_sync(0xffffffffu, mine.sum, offset);
    mine.add(top, sum);
  }
  if (threadIdx.x % 32 == 0) {
    tops[threadIdx.x / 32] = mine.top;
    sums[threadIdx.x / 32] = mine.sum;
  }
  __syncthreads();
  LogSum total;
  for (int warp = 0; warp < kWarps; ++warp) total.add(tops[warp], sums[warp]);
  return total;
}

}  // namespace twell
