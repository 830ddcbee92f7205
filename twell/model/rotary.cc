// SPDX-License-Identifier: Apache-2.0
#include "twell/model/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace twell {
namespace {

constexpr double kTurn = 2.0 * std::numbers::pi;

// Wavelengths above one limit are stretched by the factor, those below the other are unchanged, and
// those between are interpolated.
double llama3_frequency(const RopeScaling& rope, double frequency) {
  const double turns = static_cast<double>(rope.original_context) * frequency / kTurn;
  if (turns < rope.low_freq_factor) return frequency / rope.factor;
  if (turns > rope.high_freq_factor) return frequency;
  const double smooth =
      (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1.0 - smooth) * frequency / rope.factor + smooth * frequency;
}

// The dimensions between which YaRN interpolates from the original to the stretched frequencies: a
// pair there turns beta_fast and beta_slow times within the original context.
struct YarnRamp {
  double low, high;

  YarnRamp(const ModelConfig& config) {
    const RopeScaling& rope = config.rope_scaling;
    const double dim = static_cast<double>(config.head_dim);
    const auto dimension = [&](double rotations) {
      return dim * std::log(static_cast<double>(rope.original_context) / (rotations * kTurn)) /
             (2.0 * std::log(config.rope_theta));
    };
    low = dimension(rope.beta_fast);
    high = dimension(rope.beta_slow);
    if (rope.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1.0);
    if (low == high) high += 0.001;
  }
  // 0: the original frequency, 1: the stretched one.
  double at(size_t pair) const {
    return std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
  }
};

double yarn_scale(const RopeScaling& rope) {
  if (rope.attention_factor > 0.0) return rope.attention_factor;
  const auto grow = [&](double mscale) {
    return rope.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(rope.factor) + 1.0;
  };
  if (rope.mscale != 0.0 && rope.mscale_all_dim != 0.0) {
    return grow(rope.mscale) / grow(rope.mscale_all_dim);
  }
  return grow(1.0);
}

}  // namespace

RotaryFrequencies rotary_frequencies(const ModelConfig& config) {
  const RopeScaling& rope = config.rope_scaling;
  RotaryFrequencies out;
  for (int64_t i = 0; i < config.head_dim; i += 2) {
    const double exponent = -static_cast<double>(i) / static_cast<double>(config.head_dim);
    out.radians.push_back(std::pow(config.rope_theta, exponent));
  }
  switch (rope.type) {
    case RopeType::kDefault:
    case RopeType::kDynamic:  // its base grows only beyond the context, which no sequence exceeds
      break;
    case RopeType::kLinear:
      for (double& frequency : out.radians) frequency /= rope.factor;
      break;
    case RopeType::kLlama3:
      for (double& frequency : out.radians) frequency = llama3_frequency(rope, frequency);
      break;
    case RopeType::kYarn: {
      const YarnRamp ramp(config);
      for (size_t i = 0; i < out.radians.size(); ++i) {
        const double stretched = ramp.at(i);
        out.radians[i] *= stretched / rope.factor + 1.0 - stretched;
      }
      out.scale = yarn_scale(rope);
      break;
    }
  }
  return out;
}

double rounded_rotation(const ModelConfig& config, double value) {
  return config.family == Family::kPhoneLm ? std::nearbyint(127.0 * value) / 127.0 : value;
}

RopeTable rope_table(const ModelConfig& config, int64_t positions) {
  const RotaryFrequencies frequencies = rotary_frequencies(config);
  RopeTable table(positions, frequencies.radians, frequencies.scale);
  for (Buffer<float>* values : {&table.cos, &table.sin}) {
    for (float& value : values->span()) {
      value = static_cast<float>(rounded_rotation(config, static_cast<double>(value)));
    }
  }
  return table;
}

}  // namespace twell
