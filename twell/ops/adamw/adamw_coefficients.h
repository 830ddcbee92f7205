// SPDX-License-Identifier: Apache-2.0
// The constants of one AdamW step, rounded to float once. Plain, for CPU and GPU kernels alike.
#pragma once

namespace twell {

struct AdamW;

struct AdamWCoefficients {
  float grad_scale;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay;           // 1 - lr * weight_decay
  float step_size;       // lr / (1 - beta1^step)
  float rsqrt_correct2;  // 1 / sqrt(1 - beta2^step)
  float eps;
};

// Error when the step is below 1.
AdamWCoefficients adamw_coefficients(const AdamW& options);

}  // namespace twell
