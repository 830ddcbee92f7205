// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/activity_profile.h"

#include <gtest/gtest.h>

#include <set>

#include "twell/base/error.h"
#include "twell/infer/evaluate.h"
#include "twell/infer/test_model.h"
#include "twell/model/scorer_cpu.h"

namespace twell {
namespace {

// Computes the active neurons, one dot product at a time.
Pattern fired(const FfnWeights& weights, ConstMatrixF x) {
  Pattern out{.cols = weights.ffn(), .row_begin = {0}, .column = {}};
  for (int64_t m = 0; m < x.rows; ++m) {
    for (int64_t n = 0; n < weights.ffn(); ++n) {
      double sum = 0.0;
      for (int64_t d = 0; d < x.cols; ++d) {
        sum += static_cast<double>(x(m, d)) * weights.firing()(n, d);
      }
      if (sum > 0.0) out.column.push_back(static_cast<uint32_t>(n));
    }
    out.row_begin.push_back(std::ssize(out.column));
  }
  return out;
}

class ActivityProfileTest : public testing::Test {
 protected:
  // Profiles two sequences; both layers receive the input x.
  void SetUp() override {
    for (int64_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>((i * 7919) % 23) - 11.0f;
    profiler_.begin_batch(ids_, sequences_, ids_);
    for (size_t layer = 0; layer < 2; ++layer) {
      fired_[layer] = fired(model_->weights.layers[layer].ffn, x());
      profiler_.add_layer(static_cast<int64_t>(layer), fired_[layer]);
    }
  }
  ConstMatrixF x() const { return x_.matrix(200, 32); }

  Context ctx_{2};
  std::unique_ptr<Model> model_ = test_model(ctx_, kSmallVocab);
  std::vector<int32_t> ids_ = random_ids(200, kSmallVocab, 4);
  std::vector<ForwardSequence> sequences_ = {
      {.tokens = 48}, {.tokens = 48}, {.tokens = 48}, {.tokens = 48}, {.tokens = 8}};
  Buffer<float> x_{200 * 32};
  Pattern fired_[2];
  ActivityProfiler profiler_{model_->config, cpu_costs(ctx_, model_->config)};
};

TEST_F(ActivityProfileTest, CountsWhatFires) {
  const ActivityProfile& profile = profiler_.profile();
  EXPECT_EQ(profile.tokens, 200);
  std::vector<TokenActivity> by_token(kSmallVocab);
  for (size_t layer = 0; layer < 2; ++layer) {
    const LayerProfile& got = profile.layers[layer];
    std::vector<int64_t> counts(96, 0), at(48, 0);
    std::set<uint32_t> first_64, first_128, second_64, third_64;
    for (size_t m = 0; m < 200; ++m) {
      const auto expected = fired_[layer].row(static_cast<int64_t>(m));
      for (const uint32_t n : expected) {
        ++counts[n];
        if (m < 128) first_128.insert(n);
        if (m < 64) first_64.insert(n);
        if (m >= 64 && m < 128) second_64.insert(n);
        if (m >= 128 && m < 192) third_64.insert(n);
      }
      at[m % 48] += std::ssize(expected);
      by_token[static_cast<size_t>(ids_[m])].nnz += std::ssize(expected);
      by_token[static_cast<size_t>(ids_[m])].seen += layer == 0;
    }
    EXPECT_EQ(got.fired, counts);
    EXPECT_EQ(got.never_fired(), std::count(counts.begin(), counts.end(), 0));
    EXPECT_EQ(got.nnz_at, at);
    EXPECT_EQ(got.tiles_64, 3);
    EXPECT_EQ(got.tiles_128, 1);
    EXPECT_EQ(got.union_64, std::ssize(first_64) + std::ssize(second_64) + std::ssize(third_64));
    EXPECT_EQ(got.union_128, std::ssize(first_128));
    const auto all = [](const ExpectedFfn& expected) {
      int64_t runs = 0;
      for (const auto& [execution, count] : expected.runs) runs += count;
      return runs;
    };
    EXPECT_EQ(all(got.decode), 200);
    EXPECT_EQ(all(got.prompt), 1);
  }
  for (int32_t id = 0; id < kSmallVocab; ++id) {
    EXPECT_EQ(profile.by_token[static_cast<size_t>(id)].seen,
              by_token[static_cast<size_t>(id)].seen);
    EXPECT_EQ(profile.by_token[static_cast<size_t>(id)].nnz, by_token[static_cast<size_t>(id)].nnz);
  }
}

TEST_F(ActivityProfileTest, PositionsDouble) {
  const std::vector<PositionRange> ranges = profiler_.profile().positions();
  ASSERT_EQ(ranges.size(), 7u);  // 0, 1, 2-3, 4-7, 8-15, 16-31, 32-47
  EXPECT_EQ(ranges[0].last, 0);
  EXPECT_EQ(ranges[2].first, 2);
  EXPECT_EQ(ranges[2].last, 3);
  EXPECT_EQ(ranges[6].last, 47);
  EXPECT_EQ(ranges[0].tokens, 5);
  EXPECT_EQ(ranges[4].tokens, 4 * 8);
  const std::vector<int64_t>& at = profiler_.profile().layers[1].nnz_at;
  EXPECT_DOUBLE_EQ(ranges[2].nnz[1], static_cast<double>(at[2] + at[3]) / 10.0);
}

TEST_F(ActivityProfileTest, ExtremeTokens) {
  const ActivityProfile& profile = profiler_.profile();
  const std::vector<int32_t> most = profile.extreme_tokens(4, true);
  const std::vector<int32_t> least = profile.extreme_tokens(4, false);
  ASSERT_EQ(most.size(), 4u);
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_GE(profile.nnz_of(most[i - 1]), profile.nnz_of(most[i]));
    EXPECT_LE(profile.nnz_of(least[i - 1]), profile.nnz_of(least[i]));
  }
  for (const int32_t id : most) EXPECT_GE(profile.by_token[static_cast<size_t>(id)].seen, 5);
  EXPECT_GT(profile.nnz_of(most[0]), profile.nnz_of(least[0]));
  // If more tokens are requested than were seen often, all tokens seen are considered.
  EXPECT_EQ(std::ssize(profile.extreme_tokens(1000, true)),
            std::count_if(profile.by_token.begin(), profile.by_token.end(),
                          [](const TokenActivity& token) { return token.seen > 0; }));
}

TEST(ExpectedFfn, SparserIsFasterAndDenseIsOne) {
  Context ctx(2);
  const auto model = test_model(ctx, kSmallVocab);
  std::vector<double> speedups;
  for (const uint32_t active : {96u, 8u, 1u}) {
    Pattern fired{.cols = 96, .row_begin = {0}, .column = {}};
    for (int64_t m = 0; m < 64; ++m) {
      for (uint32_t n = 0; n < active; ++n) fired.column.push_back(n);
      fired.row_begin.push_back(std::ssize(fired.column));
    }
    ActivityProfiler profiler(model->config, cpu_costs(ctx, model->config));
    const std::vector<int32_t> ids(64, 3);
    const std::vector<ForwardSequence> sequences = {{.tokens = 32}, {.tokens = 32}};
    profiler.begin_batch(ids, sequences, ids);
    profiler.add_layer(0, fired);
    profiler.add_layer(1, fired);
    const ActivityProfile& profile = profiler.profile();
    EXPECT_EQ(profile.layers[0].never_fired(), 96 - active);
    EXPECT_DOUBLE_EQ(profile.layers[0].mean_union_64(), static_cast<double>(active));
    EXPECT_DOUBLE_EQ(profile.layers[0].mean_union_128(), 0.0);
    EXPECT_DOUBLE_EQ(profile.nnz_of(3), static_cast<double>(active));
    speedups.push_back(profile.prompt().speedup());
    EXPECT_EQ(profile.prompt().execution().sparse, active != 96);
    EXPECT_EQ(profile.decode().execution().sparse, active != 96);
  }
  EXPECT_DOUBLE_EQ(speedups[0], 1.0);
  EXPECT_GT(speedups[1], 1.2);
  EXPECT_GT(speedups[2], speedups[1]);
  // Every execution computes the gate projection, a third of a gated layer.
  EXPECT_LT(speedups[2], 3.0);
}

// Tokens of which some run dense and some sparse, in chunks as the layer takes them.
TEST(ExpectedFfn, ChunksAddUp) {
  Context ctx(2);
  const auto model = test_model(ctx, kSmallVocab);
  const auto costs = cpu_costs(ctx, model->config);
  Pattern busy{.cols = 96, .row_begin = {0}, .column = {}}, light = busy;
  for (int64_t m = 0; m < kFfnChunkTokens; ++m) {
    for (uint32_t n = 0; n < 96; ++n) busy.column.push_back(n);
    busy.row_begin.push_back(std::ssize(busy.column));
    light.column.push_back(5);
    light.row_begin.push_back(std::ssize(light.column));
  }
  Pattern both = busy;
  append_rows(light, both);
  ExpectedFfn sum = costs->together(busy);
  sum += costs->together(light);
  const ExpectedFfn got = costs->together(both);
  EXPECT_EQ(got.runs, sum.runs);
  EXPECT_EQ(got.runs.size(), 2u);
  EXPECT_DOUBLE_EQ(got.cost, sum.cost);
  EXPECT_DOUBLE_EQ(got.dense_cost, sum.dense_cost);
}

TEST(ExpectedFfn, OfAGpuIsWhatItsPlanPicks) {
  ModelConfig config = preset_config("0.5b");
  const auto costs = gpu_costs(config, {});
  Pattern light{.cols = config.ffn, .row_begin = {0}, .column = {}}, busy = light;
  for (int64_t m = 0; m < 1024; ++m) {
    for (uint32_t n = 0; n < 8; ++n) light.column.push_back(n * 700);
    for (uint32_t n = 0; n < 2000; ++n) busy.column.push_back(2 * n + static_cast<uint32_t>(m % 2));
    light.row_begin.push_back(std::ssize(light.column));
    busy.row_begin.push_back(std::ssize(busy.column));
  }
  EXPECT_TRUE(costs->together(light).execution().sparse);
  EXPECT_EQ(costs->one_by_one(light).execution().name, "row-stream");
  EXPECT_EQ(costs->one_by_one(light).runs[*find_gpu_ffn("row-stream")], 1024);
  EXPECT_GT(costs->together(light).speedup(), 1.2);
  EXPECT_FALSE(costs->together(busy).execution().sparse);
  EXPECT_DOUBLE_EQ(costs->together(busy).speedup(), 1.0);
}

TEST(ActivityProfile, SeesWhatTheEvaluatorRuns) {
  Context ctx(2);
  const auto model = test_model(ctx, kSmallVocab);
  ScorerCpu scorer(ctx, *model);
  ActivityProfiler profiler(model->config, cpu_costs(ctx, model->config));
  Evaluator evaluator(scorer, {.batch_tokens = 100, .profiler = &profiler});
  evaluator.add(random_ids(130, kSmallVocab, 9));
  evaluator.add(random_ids(20, kSmallVocab, 10));
  const Evaluation& result = evaluator.finish();
  EXPECT_EQ(profiler.profile().tokens, result.tokens);
  for (size_t layer = 0; layer < 2; ++layer) {
    int64_t nnz = 0;
    for (const int64_t count : profiler.profile().layers[layer].fired) nnz += count;
    EXPECT_NEAR(static_cast<double>(nnz) / static_cast<double>(result.tokens),
                result.layers[layer].mean(), 1e-9);
  }
}

TEST(ActivityProfile, RefusesActivationsWithoutZeros) {
  Context ctx(1);
  auto model = test_model(ctx, kSmallVocab);
  model->config.activation = Activation::kSilu;
  EXPECT_THROW(ActivityProfiler(model->config, cpu_costs(ctx, model->config)), InputError);
}

}  // namespace
}  // namespace twell
