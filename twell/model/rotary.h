// SPDX-License-Identifier: Apache-2.0
// The rotary embedding of a configuration, its scaling included: the formulas of transformers'
// modeling_rope_utils, in double.
#pragma once

#include <cstdint>
#include <vector>

#include "twell/model/config.h"
#include "twell/ops/rope/rope.h"

namespace twell {

struct RotaryFrequencies {
  std::vector<double> radians;  // [hd / 2] per position
  double scale = 1.0;           // of cos and sin
};
RotaryFrequencies rotary_frequencies(const ModelConfig& config);

// For positions [0, positions). PhoneLM rounds cos and sin to 127ths of the largest of a call; here
// to 127ths of 1, which that is but for calls of few tokens.
double rounded_rotation(const ModelConfig& config, double value);
RopeTable rope_table(const ModelConfig& config, int64_t positions);

}  // namespace twell
