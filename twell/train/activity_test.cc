// SPDX-License-Identifier: Apache-2.0
#include "twell/train/activity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "twell/train/test_run.h"

namespace twell {
namespace {

TEST(StepActivity, SumsMicroBatchesAndCountsTheDead) {
  const ModelConfig config = micro_config(300);
  StepActivity activity(config);
  std::vector<FfnTrainStats> stats(2);
  stats[0] = {.tokens = 10, .nnz = 40, .max_row_nnz = 9, .tail_rows = 1, .l1_sum = 5.0};
  stats[1] = {.tokens = 10, .nnz = 0};
  activity.add(stats);
  stats[0] = {.execution = FfnTrainExecution::kHybrid,
              .tokens = 30,
              .nnz = 40,
              .max_row_nnz = 7,
              .tail_rows = 2,
              .l1_sum = 3.0};
  activity.add(stats);
  activity.active()[0][5] = 1;
  const std::vector<LayerMetrics> metrics = activity.metrics();
  EXPECT_DOUBLE_EQ(metrics[0].nnz, 2.0);
  EXPECT_DOUBLE_EQ(metrics[0].l1, 0.2);
  EXPECT_EQ(metrics[0].max_nnz, 9);
  EXPECT_EQ(metrics[0].tail_rows, 3);
  EXPECT_EQ(metrics[0].dead, config.ffn - 1);
  EXPECT_EQ(metrics[0].execution, FfnTrainExecution::kHybrid);
  EXPECT_DOUBLE_EQ(metrics[1].dead_share, 1.0);
  activity.clear();
  EXPECT_EQ(activity.metrics()[0].dead, config.ffn);
  EXPECT_EQ(activity.metrics()[0].nnz, 0.0);
}

class Reinit : public testing::TestWithParam<bool> {};

TEST_P(Reinit, MovesDeadNeuronsOnlyAndRepeats) {
  ModelConfig config = micro_config(300);
  config.gated = GetParam();
  TrainOptions options = micro_options(10);
  options.reinit_strength = 0.25;
  StepActivity activity(config);
  for (auto& layer : activity.active()) std::fill(layer.begin(), layer.end(), uint8_t{1});
  activity.active()[1][3] = 0;

  using Cut = std::vector<std::vector<ShardPiece>>;
  const Cut whole = {{{.begin = 0, .size = Model(config).flat.size(), .local = 0}}};
  const auto reinit = [&](int threads, int64_t step, const Cut& cut) {
    Context ctx(threads);
    auto model = std::make_unique<Model>(config);
    init_weights(ctx, *model, 1);
    for (const auto& pieces : cut) {
      reinit_dead_neurons(ctx, options, step, activity.active(), pieces, *model);
    }
    return model;
  };
  Context ctx(1);
  Model before(config);
  init_weights(ctx, before, 1);
  const auto after = reinit(1, 5, whole);
  const float* row = before.weights.layers[1].ffn.firing().row(3);
  const int64_t begin = row - before.flat.data();
  double noise = 0.0;
  for (int64_t i = 0; i < before.flat.size(); ++i) {
    if (i < begin || i >= begin + config.width) {
      ASSERT_EQ(before.flat[i], after->flat[i]) << i;
    } else {
      const double drawn = (after->flat[i] - 0.75 * before.flat[i]) / (0.25 * options.reinit_std);
      ASSERT_LT(std::abs(drawn), 6.0);
      noise += drawn * drawn;
    }
  }
  EXPECT_GT(noise, 0.25 * static_cast<double>(config.width));  // the mean is the width

  const size_t bytes = static_cast<size_t>(before.flat.size()) * sizeof(float);
  EXPECT_EQ(std::memcmp(after->flat.data(), reinit(2, 5, whole)->flat.data(), bytes), 0);
  EXPECT_NE(std::memcmp(after->flat.data(), reinit(1, 6, whole)->flat.data(), bytes), 0);
  // Ranks move their own pieces, whose cuts lie within rows.
  Cut ranks;
  for (const int rank : {0, 1, 2}) ranks.push_back(ShardLayout(before, 3, rank).pieces());
  EXPECT_EQ(std::memcmp(after->flat.data(), reinit(1, 5, ranks)->flat.data(), bytes), 0);
}

INSTANTIATE_TEST_SUITE_P(Gates, Reinit, testing::Bool());

}  // namespace
}  // namespace twell
