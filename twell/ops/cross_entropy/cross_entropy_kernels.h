// SPDX-License-Identifier: Apache-2.0
// The launches behind cross_entropy_cuda.h, as plain types that nvcc compiles, and the losses of
// precomputed logits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

// In nats, over the tokens with a target; adds up over the micro-batches of a step.
struct CrossEntropySum {
  double loss_sum = 0.0;
  int64_t tokens = 0;
};

// One row of logits per token: computes its loss and, if grad_scale is not 0, replaces the logits
// by grad_scale * (softmax - one at the target), all 0 without a target.
struct SoftmaxGradient {
  int64_t tokens = 0;                // M
  int64_t vocab = 0;                 // V
  __nv_bfloat16* logits = nullptr;   // [M, V]
  const int32_t* targets = nullptr;  // [M]
  float* losses = nullptr;           // [M]
  bool gradient = false;
  float grad_scale = 0.0f;
};
cudaError_t launch_softmax_gradient(const SoftmaxGradient& problem, cudaStream_t stream);

// sum += the losses of the tokens with a target.
struct LossSum {
  int64_t tokens = 0;
  const float* losses = nullptr;
  const int32_t* targets = nullptr;
  CrossEntropySum* sum = nullptr;
};
cudaError_t launch_loss_sum(const LossSum& problem, cudaStream_t stream);

// -log p(targets[m]) of every row of f32 logits, 0 where there is no target (-1).
struct TokenLossesCuda {
  int64_t tokens = 0;                // M
  int64_t vocab = 0;                 // V
  const float* logits = nullptr;     // [M, V]
  const int32_t* targets = nullptr;  // [M] in [-1, V), checked by the caller
  float* losses = nullptr;           // [M] out
};
cudaError_t launch_token_losses(const TokenLossesCuda& problem, cudaStream_t stream);

}  // namespace twell
