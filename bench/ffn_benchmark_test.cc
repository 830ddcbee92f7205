// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_benchmark.h"

#include <gtest/gtest.h>

#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

TEST(FfnBenchmark, RunsEveryPolicyOnTheGivenPattern) {
  Context ctx(2);
  for (const bool gated : {true, false}) {
    const FfnBenchmark options{.width = 64, .ffn = 200, .gated = gated, .repeats = 2};
    const FfnPattern pattern = random_pattern("random", 40, options.ffn, 0.05, 1);
    const auto rows = benchmark_ffn(ctx, options, pattern);
    ASSERT_EQ(rows.size(), 4u);
    for (const FfnBenchmarkRow& row : rows) {
      EXPECT_NEAR(row.nnz_per_token, pattern.nnz_per_token(), 1e-12);
      EXPECT_GT(row.time.median, 0.0);
      EXPECT_LE(row.time.p10, row.time.p90);
    }
    EXPECT_EQ(rows[0].speedup, 1.0);
    EXPECT_EQ(rows[1].execution, FfnExecution::kRowFused);
  }
}

TEST(FfnBenchmark, RefusesPatternsThatDoNotFit) {
  Context ctx(1);
  EXPECT_THROW(benchmark_ffn(ctx, {.width = 8, .ffn = 16}, random_pattern("random", 9, 16, 0.5, 1)),
               InputError);
  EXPECT_THROW(benchmark_ffn(ctx, {.width = 8, .ffn = 16}, {"p", {1}, {16}}), InputError);
}

}  // namespace
}  // namespace twell
