// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov & Hutter) with decoupled weight decay, and the global gradient norm.
// Both work on flat f32 arrays of all parameters.
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"

namespace twell {

struct AdamW {
  float learning_rate = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float eps = 1e-8f;
  float weight_decay = 0.1f;
  float grad_scale = 1.0f;  // applied to every gradient on the fly: the clipping factor
  int64_t step = 1;         // 1-based, for bias correction
};
// One contiguous run of parameters; all spans of equal size. Matches torch.optim.AdamW.
struct AdamWParams {
  std::span<float> weight;
  std::span<const float> grad;
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
};
void adamw_step(Context& ctx, const AdamW& options, const AdamWParams& params);

// Euclidean norm, accumulated in double over fixed blocks: the same for any thread count.
double global_norm(Context& ctx, std::span<const float> values);

}  // namespace twell
