// SPDX-License-Identifier: Apache-2.0
#include "twell/train/schedule.h"

#include <cmath>
#include <numbers>

namespace twell {

double learning_rate_at(const TrainOptions& options, int64_t step) {
  if (step < options.warmup_steps) {
    return options.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(options.warmup_steps);
  }
  const double progress = static_cast<double>(step - options.warmup_steps) /
                          static_cast<double>(options.steps - options.warmup_steps);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options.learning_rate * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * cosine);
}

double l1_coeff_at(const TrainOptions& options, int64_t step, int64_t ffn) {
  const double full = options.l1_reduction == L1Reduction::kSum
                          ? options.l1_coeff
                          : options.l1_coeff / static_cast<double>(ffn);
  if (step < options.l1_zero_steps) return 0.0;
  const int64_t ramped = step - options.l1_zero_steps + 1;
  if (ramped >= options.l1_ramp_steps) return full;
  return full * static_cast<double>(ramped) / static_cast<double>(options.l1_ramp_steps);
}

double relu_share_at(const TrainOptions& options, int64_t step) {
  if (options.relufy_from == Activation::kRelu || step >= options.relufy_steps) return 1.0;
  return static_cast<double>(step + 1) / static_cast<double>(options.relufy_steps + 1);
}

}  // namespace twell
