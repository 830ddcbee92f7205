// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov & Hutter) with decoupled weight decay, and the global gradient norm.
// Both work on flat f32 arrays of all parameters and give the same bits for any thread count.
//
//   g = grad_scale * grad
//   m = beta1 * m + (1 - beta1) * g              (exp_avg)
//   v = beta2 * v + (1 - beta2) * g^2            (exp_avg_sq)
//   w = w - lr * weight_decay * w
//       - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
#pragma once

#include <cstdint>
#include <span>

#include "twell/base/context.h"

namespace twell {

// Double, because 1 - beta of a float beta is off by up to 1e-5 of itself.
struct AdamW {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double grad_scale = 1.0;  // applied to every gradient on the fly: the clipping factor
  int64_t step = 1;         // 1-based, for bias correction
};
// The constants of one step, rounded to float once. For CPU and GPU kernels alike.
struct AdamWCoefficients {
  float grad_scale;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay;           // 1 - lr * weight_decay
  float step_size;       // lr / (1 - beta1^step)
  float rsqrt_correct2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  int64_t step;
};
// Error when the step is below 1.
AdamWCoefficients adamw_coefficients(const AdamW& options);

// One contiguous run of parameters; all spans of equal size. Matches torch.optim.AdamW.
struct AdamWParams {
  std::span<float> weight;
  std::span<const float> grad;
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
  // Rounds the moments to bf16 (moment_rounding.h); they stay in f32 memory.
  bool round_moments = false;
  uint64_t seed = 0;
  int64_t first = 0;  // place of the first parameter among all of the model
};
// Errors: Error when the sizes differ or step < 1.
void adamw_step(Context& ctx, const AdamW& options, const AdamWParams& params);

// Euclidean norm, accumulated in double over fixed blocks. NaN and infinity propagate.
double global_norm(Context& ctx, std::span<const float> values);

}  // namespace twell
