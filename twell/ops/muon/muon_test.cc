// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/muon/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "twell/base/rng.h"

namespace twell {
namespace {

namespace golden {
#include "twell/ops/muon/muon_golden.inc"
}

constexpr double kUlp = std::numeric_limits<float>::epsilon();

std::vector<float> random_values(int64_t count, uint64_t stream) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = normal(5, stream, i);
  return values;
}

// The iteration in double, with loops.
std::vector<double> reference(const std::vector<float>& from, size_t rows, size_t cols) {
  std::vector<double> x(from.begin(), from.end());
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  for (double& value : x) value /= std::sqrt(squares) + 1e-7;
  const bool tall = rows > cols;
  const size_t side = std::min(rows, cols), length = std::max(rows, cols);
  const auto at = [&](size_t short_side, size_t long_side) -> double& {
    return tall ? x[long_side * cols + short_side] : x[short_side * cols + long_side];
  };
  std::vector<double> gram(side * side), factor(side * side);
  for (int step = 0; step < 5; ++step) {
    for (size_t i = 0; i < side; ++i) {
      for (size_t j = 0; j < side; ++j) {
        gram[i * side + j] = 0.0;
        for (size_t k = 0; k < length; ++k) gram[i * side + j] += at(i, k) * at(j, k);
      }
    }
    for (size_t i = 0; i < side; ++i) {
      for (size_t j = 0; j < side; ++j) {
        double square = 0.0;
        for (size_t k = 0; k < side; ++k) square += gram[i * side + k] * gram[k * side + j];
        factor[i * side + j] =
            (i == j ? 3.4445 : 0.0) - 4.775 * gram[i * side + j] + 2.0315 * square;
      }
    }
    for (size_t k = 0; k < length; ++k) {
      std::vector<double> column(side, 0.0);
      for (size_t i = 0; i < side; ++i) {
        for (size_t j = 0; j < side; ++j) column[i] += factor[i * side + j] * at(j, k);
      }
      for (size_t i = 0; i < side; ++i) at(i, k) = column[i];
    }
  }
  return x;
}

TEST(Muon, MatchesTorchsFormulaOverSteps) {
  Context ctx(1);
  size_t weight_at = 0, grads_at = 0;
  for (const auto& [rows, cols] : golden::kShapes) {
    const auto size = static_cast<size_t>(rows * cols);
    std::vector<float> weight(golden::kInitial + weight_at, golden::kInitial + weight_at + size);
    std::vector<float> exp_avg(size);
    for (const double rate : golden::kLearningRate) {
      const MuonCoefficients coefficients = muon_coefficients({.learning_rate = rate});
      std::vector<float> grad(golden::kGrads + grads_at, golden::kGrads + grads_at + size);
      grads_at += size;
      muon_momentum(ctx, coefficients, grad, exp_avg);
      orthogonalise(ctx, {grad.data(), rows, cols});
      muon_apply(ctx, coefficients, muon_shape_factor(rows, cols), weight, grad);
    }
    for (size_t i = 0; i < size; ++i) {
      // The iteration takes an error of the smallest singular value up to 3.4^5 = 470 times.
      EXPECT_NEAR(weight[i], golden::kWeights[weight_at + i], 500 * kUlp) << rows << " " << i;
      EXPECT_NEAR(exp_avg[i], golden::kExpAvg[weight_at + i], 8 * kUlp) << rows << " " << i;
    }
    weight_at += size;
  }
}

TEST(Muon, OrthogonalisesEveryShape) {
  for (const int threads : {1, 3}) {
    Context ctx(threads);
    for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {1, 7}, {7, 1}, {5, 9}, {9, 5}, {33, 17}, {16, 16}, {24, 200}, {131, 40}}) {
      const std::vector<float> from = random_values(rows * cols, static_cast<uint64_t>(rows));
      std::vector<float> got = from;
      orthogonalise(ctx, {got.data(), rows, cols});
      const std::vector<double> want =
          reference(from, static_cast<size_t>(rows), static_cast<size_t>(cols));
      double off = 0.0, norm = 0.0;
      for (size_t i = 0; i < got.size(); ++i) {
        off += std::pow(got[i] - want[i], 2.0);
        norm += want[i] * want[i];
      }
      EXPECT_LT(std::sqrt(off / norm), 500 * kUlp) << rows << " x " << cols;
      // Singular values near 1: the squared norm is about their number.
      const auto side = static_cast<double>(std::min(rows, cols));
      EXPECT_GT(norm, 0.4 * side) << rows << " x " << cols;
      EXPECT_LT(norm, 1.3 * side) << rows << " x " << cols;
    }
  }
}

TEST(Muon, ItsStepDoesNotDependOnTheGradientsSize) {
  Context ctx(1);
  for (const float scale : {1e-18f, 1e-3f, 1e18f}) {
    std::vector<float> values = random_values(12 * 30, 1), scaled = values;
    for (float& value : scaled) value *= scale;
    orthogonalise(ctx, {values.data(), 12, 30});
    orthogonalise(ctx, {scaled.data(), 12, 30});
    // The epsilon beside a norm of 2e-17 leaves next to nothing.
    const double expected = scale == 1e-18f ? 0.0 : 1.0;
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(scaled[i], expected * values[i], 1e-4) << scale << " " << i;
    }
  }
}

TEST(Muon, ZerosStayAndBrokenNumbersSpread) {
  Context ctx(1);
  std::vector<float> zeros(6 * 4);
  orthogonalise(ctx, {zeros.data(), 6, 4});
  EXPECT_EQ(zeros, std::vector<float>(24));
  for (const float broken :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values = random_values(24, 2);
    values[17] = broken;
    orthogonalise(ctx, {values.data(), 6, 4});
    for (const float value : values) EXPECT_TRUE(std::isnan(value));
  }
}

TEST(Muon, ClippingAndDecayAreThoseOfTheStep) {
  Context ctx(1);
  const MuonCoefficients c = muon_coefficients(
      {.learning_rate = 0.5, .momentum = 0.75, .weight_decay = 0.25, .grad_scale = 0.5});
  std::vector<float> grad = {4.0f}, exp_avg = {8.0f}, weight = {16.0f};
  muon_momentum(ctx, c, grad, exp_avg);
  EXPECT_EQ(exp_avg[0], 6.5f);              // 0.75 * 8 + 0.25 * 2
  EXPECT_EQ(grad[0], 0.75f * 6.5f + 0.5f);  // Nesterov: the gradient once more
  muon_apply(ctx, c, 2.0f, weight, std::vector<float>{3.0f});
  EXPECT_FLOAT_EQ(weight[0], 16.0f * 0.875f - 0.1f * 2.0f * 3.0f);
  EXPECT_EQ(muon_shape_factor(4, 9), 3.0f);
  EXPECT_EQ(muon_shape_factor(16, 9), 4.0f);
}

}  // namespace
}  // namespace twell
