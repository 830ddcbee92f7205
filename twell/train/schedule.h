// SPDX-License-Identifier: Apache-2.0
// What changes over a run as a function of the step alone; `step` counts from 0.
#pragma once

#include <cstdint>

#include "twell/train/options.h"

namespace twell {

// Linear warm-up to learning_rate over warmup_steps, then a cosine down to min_lr_ratio of it.
double learning_rate_at(const TrainOptions& options, int64_t step);

// The coefficient of (mean over layers, mean over tokens, sum over neurons of |h|): zero for
// l1_zero_steps, then linear growth over l1_ramp_steps; divided by `ffn` for the mean reduction.
double l1_coeff_at(const TrainOptions& options, int64_t step, int64_t ffn);

// Share of ReLU in the activation that a sparsified model computes with: rises over relufy_steps in
// equal parts, and is 1 from then on.
double relu_share_at(const TrainOptions& options, int64_t step);

}  // namespace twell
