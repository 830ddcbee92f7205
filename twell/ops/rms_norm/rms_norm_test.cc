// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/error.h"
#include "twell/base/test_matrix.h"

namespace twell {
namespace {

constexpr double kEps = 0x1p-23;
constexpr float kNormEps = 1e-5f;

// y of one row in double; returns 1 / rms.
double reference_row(const std::vector<double>& s, const float* weight, std::vector<double>& y) {
  double squares = 0;
  for (const double v : s) squares += v * v;
  const double inv = 1.0 / std::sqrt(squares / static_cast<double>(s.size()) + double{kNormEps});
  y.resize(s.size());
  for (size_t i = 0; i < s.size(); ++i) y[i] = s[i] * inv * weight[i];
  return inv;
}

std::vector<double> row_of(const TestMatrix& x, int64_t m) {
  return {&x.view().row(m)[0], &x.view().row(m)[0] + x.cols()};
}

// A sum of D squares is off by at most eps * D / lanes; as a random walk, by eps * sqrt(D).
double row_tolerance(int64_t width) { return kEps * (4 + std::sqrt(static_cast<double>(width))); }

TEST(RmsNorm, Forward) {
  for (const int64_t rows : {1, 3, 127}) {
    for (const int64_t width : {1, 7, 33, 256, 300}) {
      const auto x = TestMatrix::random(rows, width, 1, 3);
      const auto weight = TestMatrix::random(1, width, 2);
      TestMatrix y(rows, width, 2), inv_rms(1, rows);
      Context ctx(2);
      rms_norm_forward(ctx, {.x = x.view(),
                             .weight = weight.data(),
                             .y = y.view(),
                             .inv_rms = inv_rms.data(),
                             .eps = kNormEps});
      std::vector<double> expected;
      for (int64_t m = 0; m < rows; ++m) {
        const double inv = reference_row(row_of(x, m), weight.data(), expected);
        ASSERT_NEAR(inv_rms(0, m), inv, inv * row_tolerance(width));
        for (int64_t i = 0; i < width; ++i) {
          const double value = expected[static_cast<size_t>(i)];
          ASSERT_NEAR(y(m, i), value, std::abs(value) * row_tolerance(width));
        }
      }
      EXPECT_TRUE(y.gaps_untouched());
    }
  }
}

TEST(RmsNorm, ForwardWithResidual) {
  const int64_t rows = 37, width = 77;
  const auto x = TestMatrix::random(rows, width, 1), residual = TestMatrix::random(rows, width, 2);
  const auto weight = TestMatrix::random(1, width, 3);
  TestMatrix sum(rows, width), y(rows, width), in_place = x, y2(rows, width);
  Context ctx(3);
  rms_norm_forward(ctx, {.x = x.view(),
                         .residual = residual.view(),
                         .sum = sum.view(),
                         .weight = weight.data(),
                         .y = y.view()});
  std::vector<double> expected;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < width; ++i) ASSERT_EQ(sum(m, i), x(m, i) + residual(m, i));
    reference_row(row_of(sum, m), weight.data(), expected);
    for (int64_t i = 0; i < width; ++i) {
      const double value = expected[static_cast<size_t>(i)];
      ASSERT_NEAR(y(m, i), value, std::abs(value) * row_tolerance(width));
    }
  }
  rms_norm_forward(ctx, {.x = in_place.view(),
                         .residual = residual.view(),
                         .sum = in_place.view(),
                         .weight = weight.data(),
                         .y = y2.view()});
  EXPECT_TRUE(in_place.same_bits(sum));
  EXPECT_TRUE(y2.same_bits(y));
}

// loss = sum(y * d_y) of one row, in double.
double row_loss(const std::vector<double>& s, const std::vector<float>& weight, const float* d_y) {
  std::vector<double> y;
  reference_row(s, weight.data(), y);
  double loss = 0;
  for (size_t i = 0; i < y.size(); ++i) loss += y[i] * d_y[i];
  return loss;
}

struct Backward {
  TestMatrix d_s, d_weight;
};

Backward run_backward(const TestMatrix& s, const TestMatrix& weight, const TestMatrix& d_y,
                      int threads, float scale = 1.0f) {
  Context ctx(threads);
  TestMatrix y(s.rows(), s.cols()), inv_rms(1, s.rows());
  rms_norm_forward(ctx, {.x = s.view(),
                         .weight = weight.data(),
                         .y = y.view(),
                         .inv_rms = inv_rms.data(),
                         .eps = kNormEps});
  Backward result{TestMatrix::random(s.rows(), s.cols(), 7, 2), TestMatrix::random(1, s.cols(), 8)};
  rms_norm_backward(ctx, {.s = s.view(),
                          .weight = weight.data(),
                          .inv_rms = inv_rms.data(),
                          .d_y = d_y.view(),
                          .d_s = result.d_s.view(),
                          .d_weight = result.d_weight.data(),
                          .scale = scale});
  return result;
}

TEST(RmsNorm, BackwardMatchesFiniteDifferences) {
  for (const int64_t width : {1, 7, 35}) {
    const int64_t rows = 70;
    const auto s = TestMatrix::random(rows, width, 1, 1), d_y = TestMatrix::random(rows, width, 2);
    const auto weight = TestMatrix::random(1, width, 3);
    const auto d_s0 = TestMatrix::random(rows, width, 7),
               d_weight0 = TestMatrix::random(1, width, 8);
    const Backward result = run_backward(s, weight, d_y, 2);
    const std::vector<float> w = {weight.data(), weight.data() + width};
    std::vector<double> d_weight(static_cast<size_t>(width)), magnitude(d_weight);
    std::vector<double> y;
    for (int64_t m = 0; m < rows; ++m) {
      std::vector<double> row = row_of(s, m);
      const double inv = reference_row(row, weight.data(), y);
      double norm = 0;
      for (int64_t i = 0; i < width; ++i)
        norm += std::pow(d_y(m, i) * w[static_cast<size_t>(i)], 2);
      for (size_t i = 0; i < row.size(); ++i) {
        const int64_t col = static_cast<int64_t>(i);
        const double step = 1e-5 * std::max(1.0, std::abs(row[i])), value = row[i];
        row[i] = value + step;
        const double up = row_loss(row, w, d_y.view().row(m));
        row[i] = value - step;
        const double down = row_loss(row, w, d_y.view().row(m));
        row[i] = value;
        const double expected = (up - down) / (2 * step) + d_s0(m, col);
        // The gradient is a difference of terms as large as inv * |d_y * weight|; the central
        // difference itself is off by 1e-5^2 * the third derivative, inv^3 * |d_y * weight|.
        const double tolerance = inv * std::sqrt(norm) * row_tolerance(width) +
                                 1e-9 * std::pow(inv, 3) * std::sqrt(norm) +
                                 kEps * std::abs(expected) + 1e-9;
        ASSERT_NEAR(result.d_s(m, col), expected, tolerance) << m << ", " << col << " of " << width;
        d_weight[i] += double{d_y(m, col)} * value * inv;
        magnitude[i] += std::abs(double{d_y(m, col)} * value * inv);
      }
    }
    for (size_t i = 0; i < d_weight.size(); ++i) {
      ASSERT_NEAR(result.d_weight(0, static_cast<int64_t>(i)),
                  d_weight[i] + d_weight0(0, static_cast<int64_t>(i)),
                  magnitude[i] * row_tolerance(rows) + kEps * 4);
    }
    EXPECT_TRUE(result.d_s.gaps_untouched());
  }
}

// The scale is a power of two, which changes no rounding.
TEST(RmsNorm, BackwardOfAScaledOutputIsThatOfAScaledGradient) {
  const auto s = TestMatrix::random(70, 35, 1, 1), weight = TestMatrix::random(1, 35, 3);
  const auto d_y = TestMatrix::random(70, 35, 2);
  TestMatrix scaled = d_y;
  for (int64_t m = 0; m < 70; ++m) {
    for (int64_t i = 0; i < 35; ++i) scaled(m, i) *= 0.25f;
  }
  const Backward got = run_backward(s, weight, d_y, 2, 0.25f);
  const Backward want = run_backward(s, weight, scaled, 2);
  EXPECT_TRUE(got.d_s.same_bits(want.d_s));
  EXPECT_TRUE(got.d_weight.same_bits(want.d_weight));
}

TEST(RmsNorm, BackwardIsTheSameForAnyThreadCount) {
  const auto s = TestMatrix::random(333, 50, 1), d_y = TestMatrix::random(333, 50, 2);
  const auto weight = TestMatrix::random(1, 50, 3);
  const Backward one = run_backward(s, weight, d_y, 1);
  for (const int threads : {1, 2, 3}) {
    const Backward more = run_backward(s, weight, d_y, threads);
    EXPECT_TRUE(more.d_s.same_bits(one.d_s));
    EXPECT_TRUE(more.d_weight.same_bits(one.d_weight));
  }
}

TEST(RmsNorm, EmptyAndMismatched) {
  Context ctx(1);
  TestMatrix none(0, 8), x = TestMatrix::random(2, 8, 1), narrow(2, 7), weight(1, 8);
  rms_norm_forward(ctx, {.x = none.view(), .weight = weight.data(), .y = none.view()});
  EXPECT_THROW(rms_norm_forward(ctx, {.x = x.view(), .weight = weight.data(), .y = narrow.view()}),
               Error);
  EXPECT_THROW(
      rms_norm_forward(
          ctx, {.x = x.view(), .residual = x.view(), .weight = weight.data(), .y = x.view()}),
      Error);
}

}  // namespace
}  // namespace twell
