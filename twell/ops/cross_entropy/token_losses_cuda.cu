// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/token_losses_cuda.h"

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Largest of what was seen, and the sum of exponentials relative to it.
struct LogSum {
  float top, sum;

  __device__ void add(float other_top, float other_sum) {
    const float new_top = fmaxf(top, other_top);
    if (new_top == -INFINITY) return;
    sum = sum * expf(top - new_top) + other_sum * expf(other_top - new_top);
    top = new_top;
  }
};

__global__ void __launch_bounds__(kThreads) token_losses_kernel(TokenLossesCuda p) {
  const int32_t target = p.targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
    return;
  }
  const float* logits = p.logits + blockIdx.x * p.vocab;
  LogSum mine{-INFINITY, 0.0f};
  for (int64_t i = threadIdx.x; i < p.vocab; i += kThreads) mine.add(logits[i], 1.0f);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float top = __shfl_xor_sync(0xffffffffu, mine.top, offset);
    const float sum = __shfl_xor_sync(0xffffffffu, mine.sum, offset);
    mine.add(top, sum);
  }
  __shared__ LogSum of_warp[kWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) mine.add(of_warp[warp].top, of_warp[warp].sum);
  p.losses[blockIdx.x] = logf(mine.sum) + (mine.top - logits[target]);
}

}  // namespace

cudaError_t launch_token_losses(const TokenLossesCuda& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  token_losses_kernel<<<static_cast<unsigned>(p.tokens), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace twell
