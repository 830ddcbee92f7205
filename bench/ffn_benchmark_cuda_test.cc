// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_benchmark_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "twell/base/cuda_gtest.h"

namespace twell {
namespace {

FfnCudaBenchmark small_benchmark(int64_t width, bool gated) {
  return {.layer = {.width = width, .ffn = 1024, .gated = gated, .repeats = 2},
          .energy_seconds = 0.0};
}

// The layer runs as in the engine with the first number of tokens, and replays the pattern with the
// second.
constexpr int64_t kTokens[] = {127, 2049};

TEST(FfnBenchmarkCudaTest, TimesEightBitsBesideTheOthers) {
  TWELL_HOPPER_TEST();
  for (const int64_t tokens : kTokens) {
    for (const bool gated : {true, false}) {
      const FfnPattern pattern = random_pattern("random", tokens, 1024, 0.05, 1);
      const FfnCudaResult result = benchmark_ffn_cuda(ctx, small_benchmark(512, gated), pattern);
      EXPECT_EQ(result.left_out, std::vector<std::string>());
      const auto& rows = result.rows;
      ASSERT_GE(rows.size(), 4u);
      EXPECT_EQ(std::ranges::count(rows, "tile-union-fp8", &FfnCudaRow::name), tokens > 2048);
      EXPECT_EQ(rows[0].name(), "dense");
      EXPECT_EQ(rows[rows.size() - 2].name(), "dense-fp8");
      EXPECT_EQ(rows[rows.size() - 1].name(), "dense-int8");
      EXPECT_LE(std::ranges::count_if(rows, &FfnCudaRow::chosen), 1);
      for (const FfnCudaRow& row : rows) {
        EXPECT_EQ(row.tokens, tokens);
        EXPECT_GT(row.layer.median, 0.0) << row.name();
        EXPECT_EQ(row.gate.median > 0.0, tokens > 2048) << row.name();
        EXPECT_EQ(row.up_down.median > 0.0, tokens > 2048) << row.name();
        EXPECT_EQ(row.arithmetic.empty(), !row.eight_bit);
        if (!row.eight_bit) continue;
        EXPECT_FALSE(row.chosen);
        EXPECT_EQ(row.execution.sparse, row.name() == "tile-union-fp8");
        EXPECT_GT(row.error, 1e-3) << row.name();
        // Six roundings to four significant bits, each off by 2^-4 / sqrt(3) at most in the norm,
        // those of g magnified because only its upper tail is positive.
        EXPECT_LT(row.error, 0.25) << row.name();
      }
    }
  }
}

// On a GPU that is not a Hopper, and in a portable build, the portable executions alone.
TEST(FfnBenchmarkCudaTest, TimesTheExecutionsOfTheDevice) {
  TWELL_GPU_TEST();
  const bool hopper = ctx.compute_capability() == 90;
  for (const bool gated : {true, false}) {
    const FfnPattern pattern = random_pattern("random", 2049, 1024, 0.05, 1);
    const auto rows = benchmark_ffn_cuda(ctx, small_benchmark(512, gated), pattern).rows;
    ASSERT_GE(rows.size(), 3u);
    EXPECT_EQ(rows[1].name(), hopper ? "tile-union" : "portable-union");
    EXPECT_EQ(rows[2].name(), "row-fused");
    EXPECT_EQ(std::ranges::count(rows, "portable-union", &FfnCudaRow::name), 1);
    for (const FfnCudaRow& row : rows) {
      EXPECT_GT(row.layer.median, 0.0) << row.name();
      EXPECT_GT(row.gate.median, 0.0) << row.name();
      EXPECT_GT(row.up_down.median, 0.0) << row.name();
    }
    const auto few = benchmark_ffn_cuda(ctx, small_benchmark(512, gated),
                                        random_pattern("random", 5, 1024, 0.05, 1))
                         .rows;
    EXPECT_EQ(few[1].name(), hopper ? "decode-rows" : "portable-rows");
  }
}

TEST(FfnBenchmarkCudaTest, LeavesOutEightBitsWithAReason) {
  TWELL_HOPPER_TEST();
  for (const int64_t tokens : kTokens) {
    const FfnPattern pattern = random_pattern("random", tokens, 1024, 0.05, 1);
    const FfnCudaResult result = benchmark_ffn_cuda(ctx, small_benchmark(520, true), pattern);
    ASSERT_EQ(result.left_out.size(), 2u);
    EXPECT_EQ(result.left_out[0], "dense-fp8: width 520 and FFN size 1024 are not multiples of 16");
    EXPECT_TRUE(std::ranges::none_of(
        result.rows, [](const FfnCudaRow& row) { return row.eight_bit.has_value(); }));
  }
}

}  // namespace
}  // namespace twell
