// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/log_sum.cuh"
#include "twell/ops/cross_entropy/token_losses_cuda.h"

namespace twell {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) token_losses_kernel(TokenLossesCuda p) {
  const int32_t target = p.targets[blockIdx.x];
  if (target < 0) {
    if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
    return;
  }
  const float* logits = p.logits + blockIdx.x * p.vocab;
  LogSum mine;
  for (int64_t i = threadIdx.x; i < p.vocab; i += kThreads) mine.add(logits[i], 1.0f);
  const LogSum total = block_log_sum<kThreads>(mine);
  if (threadIdx.x != 0) return;
  p.losses[blockIdx.x] = logf(total.sum) + (total.top - logits[target]);
}

}  // namespace

cudaError_t launch_token_losses(const TokenLossesCuda& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  token_losses_kernel<<<static_cast<unsigned>(p.tokens), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace twell
