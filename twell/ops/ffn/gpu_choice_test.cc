// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gpu_choice.h"

#include <gtest/gtest.h>

namespace twell {
namespace {

const GpuLayerShape kLayer{.width = 2048, .ffn = 5632};

// What was measured on an H200: the whole layer, tile-union against dense.
struct Measured {
  const char* pattern;
  int64_t tokens;
  double nnz_per_token, mean_union, ratio;
  double extra_tiles = 0.0;
};
constexpr Measured kMeasured[] = {
    {"3e-4 layer 0", 16384, 14.6, 678.0, 2.18, 2.0 / 128.0},
    {"3e-4 layer 2", 16384, 3.0, 113.0, 2.67},
    {"3e-4 layer 4", 16384, 6.2, 286.0, 2.50},
    {"3e-4 layer 7", 16384, 56.7, 1517.0, 1.68, 8.0 / 128.0},
    {"1e-4 layer 1", 16384, 10.2, 322.0, 2.46, 1.0 / 128.0},
    {"1e-4 layer 3", 16384, 14.6, 434.0, 2.36, 1.0 / 128.0},
    {"1e-4 layer 5", 16384, 40.1, 1046.0, 1.97, 1.0 / 128.0},
    {"1e-4 layer 7", 2048, 149.6, 2741.0, 0.80, 2.0 / 16.0},
    {"random 0.2%", 16384, 11.2, 1273.0, 1.87},
    {"random 0.5%", 16384, 28.1, 2665.0, 1.41},
    {"random 1%", 16384, 56.3, 4073.0, 1.10},
    {"random 2%", 16384, 112.6, 5207.0, 0.94},
    {"random 5%", 16384, 281.5, 5624.0, 0.86},
    {"all fire", 16384, 5632.0, 5632.0, 0.86},
    {"random 15", 131072, 15.0, 1629.0, 1.79},
};

LayerActivity activity_of(const Measured& measured) {
  return {.nnz_per_token = measured.nnz_per_token,
          .union_share = measured.mean_union / 5632.0,
          .extra_tiles = measured.extra_tiles};
}

TEST(GpuChoice, PredictsWhatWasMeasured) {
  for (const Measured& measured : kMeasured) {
    const LayerActivity activity = activity_of(measured);
    const double ratio = gpu_dense_cost(kLayer, measured.tokens) /
                         gpu_tile_union_cost(kLayer, measured.tokens, activity);
    EXPECT_NEAR(ratio / measured.ratio, 1.0, 0.15)
        << measured.pattern << ": dense " << gpu_dense_cost(kLayer, measured.tokens)
        << ", tile-union " << gpu_tile_union_cost(kLayer, measured.tokens, activity);
  }
}

TEST(GpuChoice, LosesNothingWhereItWasMeasured) {
  for (const Measured& measured : kMeasured) {
    const GpuChoice choice =
        choose_gpu_execution(kLayer, measured.tokens, FfnPolicy::kAuto, activity_of(measured));
    if (measured.ratio < 0.97) {
      EXPECT_EQ(choice.execution, FfnExecution::kDense) << measured.pattern << choice.reason;
    }
    if (measured.ratio > 1.05) {
      EXPECT_NE(choice.execution, FfnExecution::kDense) << measured.pattern << choice.reason;
    }
  }
}

// Row-fused after the gate, 16,384 tokens: measured microseconds, to which the gate adds 480.
TEST(GpuChoice, KnowsRowFused) {
  const struct {
    double nnz_per_token, up_down;
  } rows[] = {{3.0, 93.0}, {6.2, 146.0}, {10.2, 215.0}, {15.0, 297.0}, {40.1, 833.0}};
  for (const auto& row : rows) {
    const LayerActivity activity{.nnz_per_token = row.nnz_per_token};
    EXPECT_NEAR(gpu_row_fused_cost(kLayer, 16384, activity) / (480.0 + row.up_down), 1.0, 0.15)
        << row.nnz_per_token;
  }
}

// A few tokens with random neurons, D and F as above: microseconds dense and row-fused.
struct FewTokens {
  int64_t tokens;
  double nnz_per_token, dense, row_fused;
};
constexpr FewTokens kFew[] = {
    {1, 30.0, 27.4, 11.6},   {8, 32.5, 27.6, 12.6},   {16, 32.2, 28.6, 14.4},
    {32, 30.5, 29.0, 15.3},  {64, 30.3, 30.1, 18.2},  {64, 61.3, 30.0, 24.4},
    {48, 92.2, 30.6, 24.5},  {1, 155.0, 27.7, 12.0},  {8, 151.1, 27.8, 18.7},
    {16, 153.7, 28.2, 18.9}, {32, 152.0, 28.8, 24.6}, {64, 149.2, 30.1, 32.2}};

TEST(GpuChoice, KnowsAFewTokens) {
  for (const FewTokens& few : kFew) {
    const LayerActivity activity{.nnz_per_token = few.nnz_per_token};
    EXPECT_NEAR(gpu_row_fused_cost(kLayer, few.tokens, activity) / few.row_fused, 1.0, 0.2)
        << few.tokens << " tokens, " << few.nnz_per_token;
    EXPECT_NEAR(gpu_dense_cost(kLayer, few.tokens) / few.dense, 1.0, 0.1) << few.tokens;
    const GpuChoice choice = choose_gpu_execution(kLayer, few.tokens, FfnPolicy::kAuto, activity);
    EXPECT_EQ(choice.execution == FfnExecution::kDense, few.dense < few.row_fused)
        << few.tokens << " tokens, " << choice.reason;
  }
}

// One token more than its few-token form takes: tiles, or what the caller says.
TEST(GpuChoice, KnowsWhereAFewTokensEnd) {
  const LayerActivity light{.nnz_per_token = 30.0};
  for (const int64_t tokens : {kFewTokens, kFewTokens + 1, int64_t{128}}) {
    const bool few = tokens <= kFewTokens;
    EXPECT_EQ(choose_gpu_execution(kLayer, tokens, FfnPolicy::kAuto, {}).execution,
              few ? FfnExecution::kRowFused : FfnExecution::kTileUnion);
    EXPECT_EQ(choose_gpu_execution(kLayer, tokens, FfnPolicy::kAuto, light).execution,
              few ? FfnExecution::kRowFused : FfnExecution::kDense);
    EXPECT_EQ(choose_gpu_execution(kLayer, tokens, FfnPolicy::kRowFused, light).execution,
              FfnExecution::kRowFused);
  }
}

TEST(GpuChoice, MeasuresBeforeItDecides) {
  const GpuChoice choice = choose_gpu_execution(kLayer, 16384, FfnPolicy::kAuto, {});
  EXPECT_EQ(choice.execution, FfnExecution::kTileUnion);
  EXPECT_EQ(choice.reason, "nothing measured yet");
}

TEST(GpuChoice, FollowsTheCaller) {
  const LayerActivity light{.nnz_per_token = 3.0, .union_share = 0.02};
  EXPECT_EQ(choose_gpu_execution(kLayer, 16384, FfnPolicy::kDense, light).execution,
            FfnExecution::kDense);
  const LayerActivity full{.nnz_per_token = 5632.0, .union_share = 1.0};
  EXPECT_EQ(choose_gpu_execution(kLayer, 16384, FfnPolicy::kTileUnion, full).execution,
            FfnExecution::kTileUnion);
}

}  // namespace
}  // namespace twell
