// SPDX-License-Identifier: Apache-2.0
#include "bench/ffn_benchmark.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

TEST(FfnBenchmark, RunsEveryPolicyOnTheGivenPattern) {
  Context ctx(2);
  for (const bool gated : {true, false}) {
    const FfnBenchmark options{.width = 64, .ffn = 200, .gated = gated, .repeats = 2};
    FfnPattern pattern = random_pattern(40, options.ffn, 0.05, 1);
    const auto rows = benchmark_ffn(ctx, options, pattern);
    ASSERT_EQ(rows.size(), 4u);
    for (const FfnBenchmarkRow& row : rows) {
      EXPECT_NEAR(row.nnz_per_token, static_cast<double>(pattern.column.size()) / 40.0, 1e-12);
      EXPECT_GT(row.median_s, 0.0);
      EXPECT_LE(row.p10_s, row.p90_s);
    }
    EXPECT_EQ(rows[0].speedup, 1.0);
    EXPECT_EQ(rows[1].execution, FfnExecution::kRowFused);
  }
}

TEST(FfnBenchmark, CutsCapturedPatterns) {
  const uint16_t row_nnz[] = {2, 0, 3, 1};
  const uint16_t column[] = {4, 9, 1, 2, 3, 7};
  const FfnPattern pattern = captured_pattern("p", row_nnz, column, 1, 2);
  EXPECT_EQ(pattern.row_nnz, (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(pattern.column, (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_THROW(captured_pattern("p", row_nnz, column, 4, 1), InputError);
  EXPECT_THROW(captured_pattern("p", row_nnz, column, 0, 0), InputError);
  EXPECT_THROW(captured_pattern("p", row_nnz, std::span(column).first(5), 2, 2), InputError);
}

TEST(FfnBenchmark, RepeatsShortCapturedPatterns) {
  const uint16_t row_nnz[] = {2, 0, 3, 1};
  const uint16_t column[] = {4, 9, 1, 2, 3, 7};
  const FfnPattern pattern = captured_pattern("p", row_nnz, column, 3, 6);
  EXPECT_EQ(pattern.row_nnz, (std::vector<int32_t>{1, 2, 0, 3, 1, 2}));
  EXPECT_EQ(pattern.column, (std::vector<uint32_t>{7, 4, 9, 1, 2, 3, 7, 4, 9}));
}

TEST(FfnBenchmark, RefusesPatternsThatDoNotFit) {
  Context ctx(1);
  EXPECT_THROW(benchmark_ffn(ctx, {.width = 8, .ffn = 16}, random_pattern(9, 16, 0.5, 1)),
               InputError);
  EXPECT_THROW(benchmark_ffn(ctx, {.width = 8, .ffn = 16}, {"p", {1}, {16}}), InputError);
}

TEST(StretchPattern, EveryNeuronFiresWhereItsSourceDid) {
  const FfnPattern pattern{.name = "p", .row_nnz = {2, 0, 3}, .column = {0, 4, 1, 2, 4}};
  for (const int64_t to : {1, 3, 5, 7, 10, 13}) {
    const FfnPattern out = stretch_pattern(pattern, 5, to);
    ASSERT_EQ(out.row_nnz.size(), pattern.row_nnz.size());
    size_t next = 0, source = 0;
    for (size_t row = 0; row < out.row_nnz.size(); ++row) {
      std::vector<uint32_t> want;
      for (int64_t j = 0; j < to; ++j) {
        const auto begin = pattern.column.begin() + static_cast<std::ptrdiff_t>(source);
        const auto end = begin + pattern.row_nnz[row];
        if (std::find(begin, end, static_cast<uint32_t>(j * 5 / to)) != end) {
          want.push_back(static_cast<uint32_t>(j));
        }
      }
      const auto begin = out.column.begin() + static_cast<std::ptrdiff_t>(next);
      EXPECT_EQ(std::vector<uint32_t>(begin, begin + out.row_nnz[row]), want) << "to " << to;
      next += static_cast<size_t>(out.row_nnz[row]);
      source += static_cast<size_t>(pattern.row_nnz[row]);
    }
  }
  EXPECT_THROW(stretch_pattern(pattern, 4, 8), InputError);
}

}  // namespace
}  // namespace twell
