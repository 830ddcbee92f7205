// SPDX-License-Identifier: Apache-2.0
// Output head and cross-entropy on the GPU, with their gradients: the op of cross_entropy.h in
// bf16. Works through chunks of tokens, so that the [M, V] logits never exist as a whole: it
// computes a chunk's logits (bf16), its losses and softmax in f32, the gradient of the logits in
// their place (bf16), then the two matrix products of the backward pass.
//   x [M, D], weight [V, D] bf16; targets [M] int32 in [0, V), or -1 for a token without a target,
//   checked by the caller. D is a multiple of 8; V may be anything, a multiple of 8 is fast.
// Losses are summed in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "twell/base/cuda.h"

namespace twell {

// In nats, over the tokens with a target; adds up over the micro-batches of a step.
struct CrossEntropySum {
  double loss_sum = 0.0;
  int64_t tokens = 0;
  double kl_sum = 0.0;  // KL(teacher || model), 0 without a teacher
};

// A teacher, whose head has the same vocabulary: the gradients are then those of grad_scale * (sum
// of (1 - share) * CE + share * KL(teacher || model)), as in Distillation (cross_entropy.h).
struct TeacherCuda {
  const __nv_bfloat16* x = nullptr;       // [M, D of the teacher] final hidden states; null: none
  const __nv_bfloat16* weight = nullptr;  // [V, D of the teacher]
  int64_t width = 0;                      // D of the teacher, a multiple of 8
  float share = 0.0f;                     // in [0, 1]
  float* kl = nullptr;                    // [M] out, 0 where there is no target
};

struct CrossEntropyCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D
  int64_t vocab = 0;                      // V
  const __nv_bfloat16* x = nullptr;       // [M, D] final hidden states
  const __nv_bfloat16* weight = nullptr;  // [V, D]
  const int32_t* targets = nullptr;       // [M]
  float grad_scale = 0.0f;                // gradients are of grad_scale * (sum of CE)
  const float* scale = nullptr;           // one value, a factor of grad_scale; null: 1
  float* losses = nullptr;                // [M] out, 0 where there is no target
  CrossEntropySum* sum = nullptr;         // one, or null: the losses of this call are added to it
  // Both null for evaluation.
  __nv_bfloat16* d_x = nullptr;  // [M, D] written
  float* d_weight = nullptr;     // [V, D] accumulated
  bool add = true;               // to d_weight; false: it is written
  TeacherCuda teacher;           // with gradients only
};

// The logits of a chunk, and the teacher's.
class CrossEntropyWorkspaceCuda {
 public:
  // In bytes_needed() bytes of the caller's device memory, aligned to 256.
  CrossEntropyWorkspaceCuda(int64_t max_tokens, int64_t vocab, std::byte* memory,
                            bool teacher = false);
  static int64_t bytes_needed(int64_t max_tokens, int64_t vocab, bool teacher = false);

 private:
  friend void cross_entropy_cuda(CudaContext& ctx, const CrossEntropyCuda& problem,
                                 const CrossEntropyWorkspaceCuda& workspace);
  int64_t vocab_;
  int64_t chunk_;  // tokens
  __nv_bfloat16* logits_;
  __nv_bfloat16* teacher_logits_;  // null without one
};

// Enqueues; never synchronises. Error if the vocabulary is not the workspace's, or only one
// gradient is requested. Which tokens share a chunk depends on M and the workspace.
void cross_entropy_cuda(CudaContext& ctx, const CrossEntropyCuda& problem,
                        const CrossEntropyWorkspaceCuda& workspace);

// The steps that also run by themselves, for tests and scores.

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
  const float* scale = nullptr;  // one value, a factor of grad_scale; null: 1
  // With a teacher and a gradient; the latter is then grad_scale * (softmax - (1 - share) * one at
  // the target - share * the teacher's softmax).
  const __nv_bfloat16* teacher = nullptr;  // [M, V] or null
  float share = 0.0f;
  float* kl = nullptr;  // [M] KL(teacher || model), 0 without a target
};
cudaError_t launch_softmax_gradient(const SoftmaxGradient& problem, cudaStream_t stream);

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
