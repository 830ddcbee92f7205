// SPDX-License-Identifier: Apache-2.0
// YaRN's corners, from its formula: limits past the last dimension, limits that coincide, and a
// scale of attention of which a configuration states only half.
#include "twell/model/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

namespace twell {
namespace {

ModelConfig yarn_config(int64_t original_context) {
  ModelConfig config = preset_config("tiny");
  config.head_dim = 16;
  config.rope_theta = 10.0;
  config.rope_scaling.type = RopeType::kYarn;
  config.rope_scaling.factor = 4.0;
  config.rope_scaling.original_context = original_context;
  config.rope_scaling.beta_fast = 32.0;
  config.rope_scaling.beta_slow = 1.0;
  config.rope_scaling.truncate = true;
  return config;
}

double frequency(size_t pair) { return std::pow(10.0, -static_cast<double>(pair) / 8.0); }

TEST(Rotary, YarnInterpolatesUpToTheLastDimension) {
  // The slow limit would be at dimension 18 of 16, the fast one is at 5.
  const RotaryFrequencies got = rotary_frequencies(yarn_config(1000));
  for (size_t pair = 0; pair < 8; ++pair) {
    const double stretched = pair < 5 ? 0.0 : (static_cast<double>(pair) - 5.0) / 10.0;
    EXPECT_NEAR(got.radians[pair], frequency(pair) * (stretched / 4.0 + 1.0 - stretched), 1e-12)
        << pair;
  }
}

TEST(Rotary, YarnStretchesAllPairsPastLimitsThatCoincide) {
  // Both limits are at dimension 0.
  const RotaryFrequencies got = rotary_frequencies(yarn_config(6));
  EXPECT_NEAR(got.radians[0], frequency(0), 1e-12);
  for (size_t pair = 1; pair < 8; ++pair) {
    EXPECT_NEAR(got.radians[pair], frequency(pair) / 4.0, 1e-12) << pair;
  }
}

TEST(Rotary, YarnScalesByBothFactorsOrByNeither) {
  ModelConfig config = yarn_config(1000);
  config.rope_scaling.mscale = 2.0;
  const double alone = 0.1 * std::log(4.0) + 1.0;
  EXPECT_NEAR(rotary_frequencies(config).scale, alone, 1e-12);
  config.rope_scaling.mscale_all_dim = 1.0;
  EXPECT_NEAR(rotary_frequencies(config).scale, (0.2 * std::log(4.0) + 1.0) / alone, 1e-12);
  config.rope_scaling.attention_factor = 1.25;  // stands for all of it
  EXPECT_EQ(rotary_frequencies(config).scale, 1.25);
}

}  // namespace
}  // namespace twell
