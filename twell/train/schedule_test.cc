// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "twell/train/options.h"

namespace twell {
namespace {

TrainOptions schedule_options() {
  TrainOptions options;
  options.steps = 110;
  options.warmup_steps = 10;
  options.learning_rate = 2e-3;
  options.min_lr_ratio = 0.1;
  return options;
}

TEST(LearningRate, WarmsUpLinearly) {
  const TrainOptions options = schedule_options();
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 0), 2e-4);
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 4), 1e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 9), 2e-3);
}

TEST(LearningRate, FollowsTheCosineDownToTheRatio) {
  const TrainOptions options = schedule_options();
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 10), 2e-3);
  EXPECT_NEAR(learning_rate_at(options, 60), 2e-3 * 0.55, 1e-15);  // half way
  EXPECT_NEAR(learning_rate_at(options, 110), 2e-4, 1e-15);        // where it would end
  for (int64_t step = 10; step < 109; ++step) {
    EXPECT_GT(learning_rate_at(options, step), learning_rate_at(options, step + 1));
  }
}

TEST(LearningRate, WarmupStableDecay) {
  TrainOptions options = schedule_options();
  options.schedule = Schedule::kWsd;
  options.decay_fraction = 0.1;  // 11 of 110 steps
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 4), 1e-3);
  for (int64_t step = 9; step <= 99; ++step)
    EXPECT_DOUBLE_EQ(learning_rate_at(options, step), 2e-3);
  for (int64_t step = 99; step <= 110; ++step) {
    EXPECT_NEAR(learning_rate_at(options, step),
                2e-3 * (0.1 + 0.9 * static_cast<double>(110 - step) / 11.0), 1e-15);
  }
  options.decay_fraction = 0.0;
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 109), 2e-3);
}

TEST(LearningRate, NoWarmup) {
  TrainOptions options = schedule_options();
  options.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 0), 2e-3);
}

TEST(L1Coefficient, ZeroThenRampThenFull) {
  TrainOptions options;
  options.l1_coeff = 4e-5;
  options.l1_zero_steps = 5;
  options.l1_ramp_steps = 4;
  EXPECT_EQ(l1_coeff_at(options, 0, 64), 0.0);
  EXPECT_EQ(l1_coeff_at(options, 4, 64), 0.0);
  EXPECT_DOUBLE_EQ(l1_coeff_at(options, 5, 64), 1e-5);
  EXPECT_DOUBLE_EQ(l1_coeff_at(options, 6, 64), 2e-5);
  EXPECT_DOUBLE_EQ(l1_coeff_at(options, 8, 64), 4e-5);
  EXPECT_DOUBLE_EQ(l1_coeff_at(options, 1000, 64), 4e-5);
}

TEST(L1Coefficient, MeanReductionDividesByTheNeurons) {
  TrainOptions options;
  options.l1_coeff = 0.5;
  EXPECT_DOUBLE_EQ(l1_coeff_at(options, 0, 5632), 0.5);
  options.l1_reduction = L1Reduction::kMean;
  EXPECT_DOUBLE_EQ(l1_coeff_at(options, 0, 5632), 0.5 / 5632);
}

TEST(Schedule, ReluTakesOverInEqualParts) {
  TrainOptions options;
  EXPECT_EQ(relu_share_at(options, 0), 1.0);
  options.relufy_from = Activation::kSilu;
  EXPECT_EQ(relu_share_at(options, 0), 1.0) << "at once";
  options.relufy_steps = 3;
  EXPECT_EQ(relu_share_at(options, 0), 0.25);
  EXPECT_EQ(relu_share_at(options, 2), 0.75);
  EXPECT_EQ(relu_share_at(options, 3), 1.0);
  EXPECT_EQ(relu_share_at(options, 1000), 1.0);
}

}  // namespace
}  // namespace twell
