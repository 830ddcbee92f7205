// SPDX-License-Identifier: Apache-2.0
// No neuron that fires is missed, and sums stay in 32 bits, on rows that are hard to screen.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "twell/ops/ffn/screened/rotated_screen_testing.h"

namespace twell {
namespace {

using namespace rotated_screen_testing;
using RowsOfBf16 = std::vector<BF16>;

constexpr int64_t kScreenedWidths[] = {16, 48, 240, 512, 1536, 2048, 4096, 5120, 8192};

class RotatedScreenTest : public testing::TestWithParam<int64_t> {
 protected:
  const int64_t width_ = GetParam();

  // Of all pairs, those that fire and are no candidates, and how many are candidates.
  struct Count {
    int64_t missed = 0, candidates = 0, fire = 0;
  };
  Count count(const RowsOfBf16& x, const RowsOfBf16& weights, ScreenBound bound) const {
    const Gate gate = make_gate(weights, width_, bound);
    const Rows rows = make_rows(x, width_, bound, gate.rounding);
    Count count;
    for (int64_t t = 0; t < std::ssize(rows.bounds); ++t) {
      for (int64_t n = 0; n < std::ssize(gate.spread); ++n) {
        const bool candidate = is_candidate(gate, n, rows, t, width_);
        const bool fire = fires(x.data() + t * width_, weights.data() + n * width_, width_);
        count.missed += fire && !candidate;
        count.candidates += candidate;
        count.fire += fire;
      }
    }
    return count;
  }
};
INSTANTIATE_TEST_SUITE_P(Widths, RotatedScreenTest, testing::ValuesIn(kScreenedWidths));

TEST_P(RotatedScreenTest, PositionsAreAPermutationWithinBlocks) {
  std::set<int64_t> seen;
  for (int64_t c = 0; c < width_; ++c) {
    const int64_t at = rotated_position(c, width_);
    EXPECT_EQ(at / hadamard_block(width_), c / hadamard_block(width_));
    seen.insert(at);
  }
  EXPECT_EQ(std::ssize(seen), width_);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), width_ - 1);
}

TEST_P(RotatedScreenTest, RotationKeepsProducts) {
  const RowsOfBf16 a = hard_row(0, width_, 3), b = hard_row(1, width_, 4);
  const std::vector<double> ra = rotated(a.data(), width_), rb = rotated(b.data(), width_);
  double plain = 0.0, turned = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    plain += double{to_float(a[i])} * to_float(b[i]);
    turned += ra[i] * rb[i];
  }
  turned /= hadamard_block(width_);
  EXPECT_NEAR(turned, plain, 1e-12 * norm_of(ra) * norm_of(rb));
}

TEST_P(RotatedScreenTest, HardRowsAreNeverMissed) {
  const RowsOfBf16 x = hard_rows(2 * kHardKinds, width_, 1),
                   weights = hard_rows(2 * kHardKinds, width_, 2);
  for (const ScreenBound bound : {ScreenBound::kStrict, ScreenBound::kProbabilistic}) {
    EXPECT_EQ(count(x, weights, bound).missed, 0);
    EXPECT_EQ(count(weights, weights, bound).missed, 0);
  }
}

// Rows along the error of the weights make the strict bound necessary: half of it would miss them.
TEST_P(RotatedScreenTest, MisleadingRowsAreNotMissed) {
  for (const int64_t kind : {0, 1, 10, 12}) {
    const RowsOfBf16 weights = hard_row(kind, width_, 5);
    const RowsOfBf16 x = misleading_row(weights, ScreenBound::kStrict);
    if (!fires(x.data(), weights.data(), width_)) continue;
    EXPECT_EQ(count(x, weights, ScreenBound::kStrict).missed, 0) << kind;
    if (kind != 0 || width_ < 512) continue;
    const QuantisedRow w =
        quantised(rotated(weights.data(), width_), rounding_of(ScreenBound::kStrict, true));
    const QuantisedRow row =
        quantised(rotated(x.data(), width_), rounding_of(ScreenBound::kStrict, false));
    const int32_t sum = product(row.values.data(), w.values.data(), width_);
    EXPECT_LT(sum, -0.8 * w.error() * row.norm());
  }
}

TEST_P(RotatedScreenTest, CandidatesAreFew) {
  if (width_ < 512) return;
  RowsOfBf16 x, weights;
  for (int64_t r = 0; r < 24; ++r) {
    for (auto* rows : {&x, &weights}) {
      const RowsOfBf16 row = hard_row(r * kHardKinds, width_, rows == &x ? 8 : 9);
      rows->insert(rows->end(), row.begin(), row.end());
    }
  }
  // Products are normal with a standard deviation of |W| |X| / sqrt(D). Values are about normal, 33
  // steps or more wide, and their rounding has a variance of 1/12. 0.08 is four standard deviations
  // of the fraction.
  const double root = std::sqrt(static_cast<double>(width_)), pairs = 24 * 24;
  const double sums = screen_sum_error(width_) * root;
  const auto below = [](double deviations) { return std::erfc(-deviations / std::sqrt(2.0)) / 2; };
  const Count strict = count(x, weights, ScreenBound::kStrict);
  const Count probabilistic = count(x, weights, ScreenBound::kProbabilistic);
  EXPECT_EQ(strict.missed + probabilistic.missed, 0);
  EXPECT_LE(static_cast<double>(strict.candidates) / pairs,
            below(2 * root / std::sqrt(12.0) / 31 + sums) + 0.08);
  EXPECT_LE(static_cast<double>(probabilistic.candidates) / pairs,
            below(kScreenDeviations / 2 * std::sqrt(2.0) / 31 + sums) + 0.08);
}

TEST_P(RotatedScreenTest, WhatIsNotFiniteIsAlwaysACandidate) {
  const RowsOfBf16 ordinary = hard_row(0, width_, 1);
  for (const ScreenBound bound : {ScreenBound::kStrict, ScreenBound::kProbabilistic}) {
    for (const int64_t kind : {5, 6, 7, 8, 13}) {
      const RowsOfBf16 odd = hard_row(kind, width_, 6), zeros = hard_row(3, width_, 0);
      EXPECT_EQ(count(odd, ordinary, bound).candidates, 1) << kind;
      EXPECT_EQ(count(ordinary, odd, bound).candidates, 1) << kind;
      EXPECT_EQ(count(odd, odd, bound).candidates, 1) << kind;
      EXPECT_EQ(count(zeros, odd, bound).candidates, 1) << kind;
      EXPECT_EQ(count(zeros, ordinary, bound).candidates, 0) << kind;
    }
  }
}

TEST_P(RotatedScreenTest, BoundsKeepTheirRanges) {
  const RowsOfBf16 x = hard_rows(2 * kHardKinds, width_, 1);
  for (const ScreenBound bound : {ScreenBound::kStrict, ScreenBound::kProbabilistic}) {
    const Gate gate = make_gate(x, width_, bound);
    const Rows rows = make_rows(x, width_, bound, gate.rounding);
    for (int64_t r = 0; r < std::ssize(gate.spread); ++r) {
      const QuantisedRow row =
          quantised(rotated(x.data() + r * width_, width_), rounding_of(bound, false));
      const auto [base, slope] = rows.bounds[static_cast<size_t>(r)];
      const int32_t spread = gate.spread[static_cast<size_t>(r)];
      EXPECT_LE(base, kScreenMostBase);
      EXPECT_GE(base, -kScreenMostSpread - 1);
      EXPECT_GE(slope, 0);
      EXPECT_LE(slope, kScreenMostSlope);
      EXPECT_TRUE((spread >= 0 && spread <= kScreenMostSpread) || spread == kScreenAlways);
      // All finite rows of ordinary size have bounds of their own.
      const bool exact = bound == ScreenBound::kStrict && row.error() == 0.0;
      EXPECT_EQ(slope > 0,
                row.kind == QuantisedRow::kZero || (row.kind == QuantisedRow::kTaken && !exact));
    }
  }
}

TEST(RotatedScreen, SumsStayIn32Bits) {
  for (int64_t width = 16; width <= kMaxRotatedWidth; width += 16) {
    const int64_t products = (int64_t{127 * 127} * width) << screen_shift(width);
    EXPECT_LE(products, int64_t{1} << 30);
    EXPECT_LT(products + kScreenMostBase + int64_t{kScreenMostSlope} * kScreenAlways,
              int64_t{1} << 31);
    // The most that a row's bounds can ask for: all values 127, all errors 1/2 where rounding is to
    // the nearest.
    const double root = std::sqrt(static_cast<double>(width));
    EXPECT_LT(std::ceil(127 * root / 2 * 1.0001), kScreenMostSpread);
    EXPECT_LT(std::ldexp(root, screen_shift(width)) * 1.0001, kScreenMostSlope);
    EXPECT_LT(127.0 * 127.0 / kScreenSquares * 1.0001, kScreenMostSpread);
    const double factor = (kScreenDeviations / 4 + 0x1p-16 * root) / (kScreenTypical * root) +
                          127 * (screen_sum_error(width) + 0x1p-19) / (2 * kScreenTypical);
    EXPECT_LT(std::ldexp(kScreenSquares * root * root * factor, screen_shift(width)) * 1.0001,
              kScreenMostSlope / 2);
    EXPECT_LT(
        std::ldexp(127 * root * root * (0.5 + 127 * screen_sum_error(width)), screen_shift(width)),
        kScreenMostBase);
  }
}

TEST(RotatedScreen, RandomNumbersAreUniform) {
  for (const bool of_gate : {false, true}) {
    double sum = 0.0, squares = 0.0, together = 0.0;
    int negated = 0;
    for (int64_t i = 0; i < kMaxRotatedWidth; ++i) {
      const double u = screen_random(i, of_gate) * 0x1p-16 - 0.5;
      sum += u;
      squares += u * u;
      together += u * (screen_random(i, !of_gate) * 0x1p-16 - 0.5);
      negated += rotation_negates(i);
    }
    const double n = kMaxRotatedWidth;
    EXPECT_LT(std::fabs(sum), 4 * std::sqrt(n / 12));
    EXPECT_NEAR(squares / n, 1.0 / 12, 4 * std::sqrt(1.0 / 180 / n));
    EXPECT_LT(std::fabs(together), 4 * std::sqrt(n) / 12);
    EXPECT_LT(std::fabs(negated - n / 2), 4 * std::sqrt(n) / 2);
  }
}

// Errors of products in standard deviations as the bound has them, k = 1. Half steps have the
// largest variance, which the bound assumes of all values.
TEST(RotatedScreen, ErrorsOfStochasticRoundingStayBelowHoeffdingsBound) {
  const int64_t width = 256;
  const int draws = 20000;
  for (const bool halves : {false, true}) {
    double squares = 0.0;
    int beyond[3] = {};
    for (int draw = 0; draw < draws; ++draw) {
      std::vector<double> x, w;
      for (int64_t i = 0; i < width; ++i) {
        const auto bits = philox(3, static_cast<uint64_t>(draw), static_cast<uint64_t>(i));
        const auto steps = [&](uint32_t b) {
          const double integer = static_cast<int>(b % 201) - 100;
          return i == 0 ? 127.0 : halves ? integer + 0.5 : integer + (b >> 16) * 0x1p-16;
        };
        x.push_back(steps(bits[0]));
        w.push_back(steps(bits[1]));
      }
      const QuantisedRow rx = quantised(x, round_randomly(false, draw * width)),
                         rw = quantised(w, round_randomly(true, draw * width));
      double exact = 0.0;
      for (size_t i = 0; i < x.size(); ++i) exact += x[i] * w[i];
      const double deviation =
          std::hypot(rx.norm() + std::sqrt(static_cast<double>(width)), rw.norm()) / 2;
      const double error = (product(rx.values.data(), rw.values.data(), width) - exact) / deviation;
      squares += error * error;
      for (int k = 1; k <= 2; ++k) beyond[k] += error < -k;
      EXPECT_LT(std::fabs(error), kScreenDeviations);
    }
    // A variance of 1 would be the bound reached.
    EXPECT_LT(squares / draws, halves ? 1.0 : 0.7);
    EXPECT_GT(squares / draws, halves ? 0.9 : 0.55);
    for (int k = 1; k <= 2; ++k) {
      EXPECT_LT(beyond[k], draws * std::exp(-k * k / 2.0)) << halves;
      EXPECT_GT(beyond[k], 0);
    }
  }
}

}  // namespace
}  // namespace twell
