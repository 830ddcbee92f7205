// SPDX-License-Identifier: Apache-2.0
// Output head and cross-entropy in one: logits = x W^T, CE = logsumexp(logits) - logits[target].
// Works through chunks of tokens, so that the [M, V] logits never exist as a whole.
//   x [M, D] f32, weight [V, D] f32, targets [M] int32 in [0, V), or -1 for a token without a
//   target.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"
#include "twell/base/matrix.h"
#include "twell/format/weight_matrix.h"

namespace twell {

struct CrossEntropy {
  ConstMatrixF x;                    // [M, D] final hidden states
  ConstMatrixF weight;               // [V, D]
  std::span<const int32_t> targets;  // [M]
  // Gradient of grad_scale * (sum of CE); both empty for evaluation.
  float grad_scale = 0.0f;
  MatrixF d_x = {};       // [M, D], written
  MatrixF d_weight = {};  // [V, D], accumulated
};

struct CrossEntropyResult {
  double loss_sum = 0.0;  // nats, over the tokens with a target
  int64_t tokens = 0;
};
CrossEntropyResult cross_entropy(Context& ctx, const CrossEntropy& problem);
// Bytes of scratch memory needed, without that of the matrix products.
int64_t cross_entropy_scratch_bytes(int64_t tokens, int64_t vocab);

// -log p(targets[m]) per token, 0 for a token without a target: for scoring texts. losses [M].
// The weight may be f32, bf16 or f16.
void token_losses(Context& ctx, ConstMatrixF x, const WeightMatrix& weight,
                  std::span<const int32_t> targets, std::span<float> losses);

// With a teacher: (1 - share) * CE + share * KL(teacher || model) over the tokens that have a
// target, with its gradients. Neither model's logits ever exist as a whole.
//   x, teacher_x [M, D] final hidden states, weight, teacher_weight [V, D]; each model has its D.
struct Distillation {
  ConstMatrixF x;
  ConstMatrixF weight;
  ConstMatrixF teacher_x;
  ConstMatrixF teacher_weight;
  std::span<const int32_t> targets;
  float share = 0.5f;       // of the KL term, in [0, 1]
  float grad_scale = 0.0f;  // the gradient is that of grad_scale * (sum over tokens)
  MatrixF d_x;              // [M, D], written
  MatrixF d_weight;         // [V, D], accumulated
};

struct DistillationResult {
  double ce_sum = 0.0;  // nats, over the tokens with a target
  double kl_sum = 0.0;
  int64_t tokens = 0;
};
DistillationResult distill(Context& ctx, const Distillation& problem);

}  // namespace twell
