// SPDX-License-Identifier: Apache-2.0
// Output head with a teacher: (1 - share) * CE + share * KL(teacher || model) over the tokens that
// have a target, with its gradients. As in cross_entropy.h, neither model's logits ever exist as a
// whole.
//   x, teacher_x [M, D] final hidden states, weight, teacher_weight [V, D], targets [M] as there.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

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
