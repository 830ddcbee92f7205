// SPDX-License-Identifier: Apache-2.0
#include "bench/patterns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bench/harness.h"
#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

const FfnPattern kPattern{"p", {2, 0, 3, 1}, {4, 9, 1, 2, 3, 7}};

TEST(Patterns, CutsAndRepeats) {
  EXPECT_EQ(repeated(kPattern, 1, 2).row_nnz, (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(repeated(kPattern, 1, 2).columns, (std::vector<uint32_t>{1, 2, 3}));
  const FfnPattern longer = repeated(kPattern, 3, 6);
  EXPECT_EQ(longer.row_nnz, (std::vector<int32_t>{1, 2, 0, 3, 1, 2}));
  EXPECT_EQ(longer.columns, (std::vector<uint32_t>{7, 4, 9, 1, 2, 3, 7, 4, 9}));
  EXPECT_THROW(repeated(kPattern, 4, 1), InputError);
  EXPECT_THROW(repeated(kPattern, 0, 0), InputError);
}

TEST(Patterns, MeanUnionCountsNeuronsOf128Tokens) {
  EXPECT_EQ(mean_union(kPattern), 6.0);
  EXPECT_EQ(mean_union(repeated(kPattern, 0, 128)), 6.0);
  EXPECT_EQ(mean_union(repeated(kPattern, 0, 129)), (6.0 + 2.0) / 2.0);
}

TEST(StretchPattern, EveryNeuronIsActiveWhereItsSourceWas) {
  const FfnPattern pattern{.name = "p", .row_nnz = {2, 0, 3}, .columns = {0, 4, 1, 2, 4}};
  for (const int64_t to : {1, 3, 5, 7, 10, 13}) {
    const FfnPattern out = stretch_pattern(pattern, 5, to);
    ASSERT_EQ(out.row_nnz.size(), pattern.row_nnz.size());
    size_t next = 0, source = 0;
    for (size_t row = 0; row < out.row_nnz.size(); ++row) {
      std::vector<uint32_t> want;
      for (int64_t j = 0; j < to; ++j) {
        const auto begin = pattern.columns.begin() + static_cast<std::ptrdiff_t>(source);
        const auto end = begin + pattern.row_nnz[row];
        if (std::find(begin, end, static_cast<uint32_t>(j * 5 / to)) != end) {
          want.push_back(static_cast<uint32_t>(j));
        }
      }
      const auto begin = out.columns.begin() + static_cast<std::ptrdiff_t>(next);
      EXPECT_EQ(std::vector<uint32_t>(begin, begin + out.row_nnz[row]), want) << "to " << to;
      next += static_cast<size_t>(out.row_nnz[row]);
      source += static_cast<size_t>(pattern.row_nnz[row]);
    }
  }
  EXPECT_THROW(stretch_pattern(pattern, 4, 8), InputError);
}

// The gate of random operands with the pattern's columns is positive where the pattern is active.
TEST(FiringColumns, FireAsThePattern) {
  constexpr int64_t kWidth = 96, kFfn = 40;
  const FfnPattern pattern = random_pattern("p", 60, kFfn, 0.2, 5);
  for (const int64_t tokens : {1, 48, 100}) {
    const FiringColumns columns = firing_columns(pattern, tokens, kWidth, kFfn);
    ASSERT_EQ(columns.period, 48);
    ASSERT_EQ(std::ssize(columns.x), tokens * columns.period);
    ASSERT_EQ(std::ssize(columns.weight), kFfn * columns.period);
    const FfnPattern want = repeated(repeated(pattern, 0, columns.period), 0, tokens);
    size_t next = 0;
    for (int64_t m = 0; m < tokens; ++m) {
      std::vector<uint32_t> active;
      for (int64_t n = 0; n < kFfn; ++n) {
        double gate = 0.0;
        for (int64_t d = 0; d < kWidth; ++d) {
          const bool first = d < columns.period;
          const auto at = [&](int64_t row) {
            return static_cast<size_t>(row * columns.period + d);
          };
          gate += (first ? to_float(columns.x[at(m)])
                         : normal(1, 0, static_cast<uint64_t>(m * kWidth + d))) *
                  (first ? to_float(columns.weight[at(n)])
                         : 0.02f * normal(2, 0, static_cast<uint64_t>(n * kWidth + d)));
        }
        EXPECT_GT(std::abs(gate), 10.0);
        if (gate > 0.0) active.push_back(static_cast<uint32_t>(n));
      }
      const auto begin = want.columns.begin() + static_cast<std::ptrdiff_t>(next);
      const int32_t count = want.row_nnz[static_cast<size_t>(m)];
      EXPECT_EQ(active, std::vector<uint32_t>(begin, begin + count)) << "token " << m;
      next += static_cast<size_t>(count);
    }
  }
}

class CapturedPattern : public ::testing::Test {
 protected:
  std::string refusal(const std::vector<uint16_t>& row_nnz, const std::vector<uint16_t>& columns,
                      int64_t ffn) const {
    const auto path = temp_.path() / "patterns.safetensors";
    const auto tensor = [](const std::string& name, const std::vector<uint16_t>& values) {
      return TensorToWrite{name, "U16", {std::ssize(values)}, [&values](const auto& sink) {
                             sink(std::as_bytes(std::span(values)));
                           }};
    };
    const TensorToWrite tensors[] = {tensor("layer3.row_nnz", row_nnz),
                                     tensor("layer3.col", columns)};
    write_safetensors(path, tensors, {});
    const SafetensorsFile file(path);
    EXPECT_EQ(captured_layers(file), std::set<int64_t>{3});
    try {
      const FfnPattern pattern = captured_pattern(file, 3, ffn);
      EXPECT_TRUE(std::equal(columns.begin(), columns.end(), pattern.columns.begin()));
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }
  const TempFolder temp_;
};

// Regression: a column beyond F in a tile of 256 that begins within F was read past the weights'
// end.
TEST_F(CapturedPattern, NeuronsMustBeInTheLayer) {
  EXPECT_EQ(refusal({1, 2}, {5639, 0, 5639}, 5640), "");
  EXPECT_THAT(refusal({1, 2}, {5639, 0, 5640}, 5640),
              ::testing::HasSubstr("neuron 5640 of token 1 is not in a layer of 5640"));
  EXPECT_THAT(refusal({1, 2}, {0, 0, 65535}, 5640), ::testing::HasSubstr("neuron 65535"));
}

TEST_F(CapturedPattern, RowsMustBeWhole) {
  EXPECT_THAT(refusal({1, 3}, {1, 2, 3}, 8), ::testing::HasSubstr("adds up to 4"));
  EXPECT_THAT(refusal({3}, {1, 3, 3}, 8), ::testing::HasSubstr("ascending"));
  EXPECT_THAT(refusal({}, {}, 8), ::testing::HasSubstr("no tokens"));
}

TEST(Patterns, PackedEqualsDense) {
  constexpr int64_t kFfn = 520;
  // These densities cover empty, sparse, full and spilled tiles.
  for (const double density : {0.0, 0.02, 0.12, 1.0}) {
    const FfnPattern pattern = random_pattern("r", 40, kFfn, density, 1);
    const PackedPattern packed = pack_pattern(pattern, kFfn, 7);
    const std::vector<BF16> dense = dense_pattern(pattern, kFfn, 7);
    std::vector<BF16> unpacked(dense.size());
    for (int64_t row = 0; row < 40; ++row) {
      for (int64_t tile = 0; tile < packed.shape.tiles(); ++tile) {
        const uint32_t* words = packed.words.data() + packed.shape.offset(row, tile);
        const bool fits = static_cast<int64_t>(words[0]) <= packed.shape.capacity();
        for (int64_t i = 0; i < (fits ? static_cast<int64_t>(words[0]) : 256); ++i) {
          const int64_t column =
              fits ? TwellWord<uint32_t>::column(words[1 + i], tile * 256) : tile * 256 + i;
          if (column >= kFfn) continue;
          unpacked[static_cast<size_t>(row * kFfn + column)] =
              fits ? BF16{static_cast<uint16_t>(words[1 + i] >> 16)}
                   : packed.spill[static_cast<size_t>(words[1] * 256 + i)];
        }
      }
    }
    for (size_t i = 0; i < dense.size(); ++i) ASSERT_EQ(unpacked[i].bits, dense[i].bits) << i;
  }
}

TEST(Timing, Percentiles) {
  const Timing timing = summarize({3.0, 1.0, 2.0, 5.0, 4.0});
  EXPECT_DOUBLE_EQ(timing.median, 3.0);
  EXPECT_DOUBLE_EQ(timing.p10, 1.4);
  EXPECT_DOUBLE_EQ(timing.p90, 4.6);
  EXPECT_DOUBLE_EQ(summarize({2.0}).p90, 2.0);
  EXPECT_THROW(summarize({}), InputError);
}

}  // namespace
}  // namespace twell
