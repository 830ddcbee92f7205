// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/ops/cross_entropy/softmax_simd.h"

namespace twell {
namespace {

constexpr double kEps = std::numeric_limits<float>::epsilon();

struct Shape {
  int64_t tokens, width, vocab;
};

struct Case {
  Case(Shape s, float scale)
      : shape(s),
        x(static_cast<size_t>(s.tokens * s.width)),
        weight(static_cast<size_t>(s.vocab * s.width)),
        targets(static_cast<size_t>(s.tokens)) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = normal(1, 0, i);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = scale * normal(1, 1, i);
    for (size_t i = 0; i < targets.size(); ++i) {
      const uint64_t drawn = uniform_below(1, 2, i, static_cast<uint64_t>(s.vocab));
      targets[i] = i % 5 == 3 ? -1 : static_cast<int32_t>(drawn);
    }
  }
  ConstMatrixF x_view() const { return {x.data(), shape.tokens, shape.width}; }
  ConstMatrixF weight_view() const { return {weight.data(), shape.vocab, shape.width}; }

  Shape shape;
  std::vector<float> x, weight;
  std::vector<int32_t> targets;
};

struct Reference {
  double loss_sum = 0.0;
  std::vector<double> losses, d_x, d_weight;
  double max_logit_norm = 0.0;  // max |x_m| |w_v|, which bounds the logits' rounding
};

Reference reference(const Case& c, const std::vector<double>& x, double grad_scale) {
  const size_t width = static_cast<size_t>(c.shape.width);
  const size_t vocab = static_cast<size_t>(c.shape.vocab);
  Reference r{.losses = std::vector<double>(c.targets.size()),
              .d_x = std::vector<double>(x.size()),
              .d_weight = std::vector<double>(c.weight.size())};
  std::vector<double> logits(vocab);
  for (size_t m = 0; m < c.targets.size(); ++m) {
    if (c.targets[m] < 0) continue;
    const double* const row = x.data() + m * width;
    for (size_t v = 0; v < vocab; ++v) {
      const float* const w = c.weight.data() + v * width;
      logits[v] = std::inner_product(row, row + width, w, 0.0);
      const double norms = std::sqrt(std::inner_product(row, row + width, row, 0.0) *
                                     std::inner_product(w, w + width, w, 0.0));
      r.max_logit_norm = std::max(r.max_logit_norm, norms);
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const double l : logits) sum += std::exp(l - max);
    const size_t target = static_cast<size_t>(c.targets[m]);
    r.losses[m] = std::log(sum) + max - logits[target];
    r.loss_sum += r.losses[m];
    for (size_t v = 0; v < vocab; ++v) {
      const double d = grad_scale * (std::exp(logits[v] - max) / sum - (v == target ? 1.0 : 0.0));
      for (size_t k = 0; k < width; ++k) {
        r.d_x[m * width + k] += d * static_cast<double>(c.weight[v * width + k]);
        r.d_weight[v * width + k] += d * row[k];
      }
    }
  }
  return r;
}

std::vector<double> widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

struct Output {
  CrossEntropyResult result;
  std::vector<float> d_x, d_weight;
};

Output run(Context& ctx, const Case& c, float grad_scale, float d_weight_start) {
  Output out;
  out.d_x.assign(c.x.size(), std::numeric_limits<float>::quiet_NaN());
  out.d_weight.assign(c.weight.size(), d_weight_start);
  out.result =
      cross_entropy(ctx, {.x = c.x_view(),
                          .weight = c.weight_view(),
                          .targets = c.targets,
                          .grad_scale = grad_scale,
                          .d_x = {out.d_x.data(), c.shape.tokens, c.shape.width},
                          .d_weight = {out.d_weight.data(), c.shape.vocab, c.shape.width}});
  return out;
}

class CrossEntropyShapes : public testing::TestWithParam<Shape> {};

TEST_P(CrossEntropyShapes, MatchesDoubleReference) {
  const Case c(GetParam(), 0.3f);
  constexpr float kGradScale = 0.125f;
  constexpr float kStart = 0.5f;
  Context ctx(2);
  const Reference expected = reference(c, widened(c.x), static_cast<double>(kGradScale));
  const Output out = run(ctx, c, kGradScale, kStart);

  // A logit is a dot product of width terms; the loss sums a handful of their rounding errors.
  const double width = static_cast<double>(c.shape.width);
  const double logit_error = kEps * (4.0 + std::sqrt(width)) * (1.0 + expected.max_logit_norm);
  const double tokens = static_cast<double>(c.shape.tokens);
  EXPECT_NEAR(out.result.loss_sum, expected.loss_sum, 2 * logit_error * tokens);
  EXPECT_EQ(out.result.tokens,
            std::count_if(c.targets.begin(), c.targets.end(), [](int32_t t) { return t >= 0; }));
  // d_logits has norm at most sqrt(2) per token; |w| and |x| bound the factors.
  double x_max = 0.0, w_max = 0.0;
  for (const float v : c.x) x_max = std::max(x_max, std::abs(static_cast<double>(v)));
  for (const float v : c.weight) w_max = std::max(w_max, std::abs(static_cast<double>(v)));
  const double d_logit_error = 4 * static_cast<double>(kGradScale) * logit_error;
  for (size_t i = 0; i < out.d_x.size(); ++i) {
    EXPECT_NEAR(out.d_x[i], expected.d_x[i], d_logit_error * w_max * 4) << i;
  }
  for (size_t i = 0; i < out.d_weight.size(); ++i) {
    EXPECT_NEAR(out.d_weight[i], static_cast<double>(kStart) + expected.d_weight[i],
                d_logit_error * x_max * std::sqrt(tokens) + kEps)
        << i;
  }

  std::vector<float> losses(c.targets.size(), std::numeric_limits<float>::quiet_NaN());
  token_losses(ctx, c.x_view(), c.weight_view(), c.targets, losses);
  for (size_t m = 0; m < losses.size(); ++m) {
    EXPECT_NEAR(losses[m], expected.losses[m], 2 * logit_error + kEps * expected.losses[m]) << m;
  }
  const CrossEntropyResult evaluated =
      cross_entropy(ctx, {.x = c.x_view(), .weight = c.weight_view(), .targets = c.targets});
  EXPECT_EQ(evaluated.loss_sum, out.result.loss_sum);
}

// The last one's tokens take two chunks: one has 256 where the vocabulary is large.
INSTANTIATE_TEST_SUITE_P(Shapes, CrossEntropyShapes,
                         testing::Values(Shape{1, 8, 1}, Shape{1, 16, 3}, Shape{7, 24, 33},
                                         Shape{127, 8, 50}, Shape{129, 16, 1000},
                                         Shape{300, 8, 4097}, Shape{270, 2, 33000}));

TEST(CrossEntropy, ReferenceGradientMatchesFiniteDifferences) {
  const Case c({5, 8, 11}, 0.5f);
  const std::vector<double> x = widened(c.x);
  const Reference r = reference(c, x, 1.0);
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < x.size(); ++i) {
    std::vector<double> plus = x, minus = x;
    plus[i] += kStep;
    minus[i] -= kStep;
    const double slope =
        (reference(c, plus, 1.0).loss_sum - reference(c, minus, 1.0).loss_sum) / (2 * kStep);
    EXPECT_NEAR(r.d_x[i], slope, 1e-8) << i;
  }
}

TEST(CrossEntropy, RepeatsBitForBitAndSurvivesExtremeLogits) {
  const Case c({33, 16, 257}, 40.0f);  // logits in the hundreds: most exponentials vanish
  for (const int threads : {1, 2, 3}) {
    Context ctx(threads);
    const Output first = run(ctx, c, 1.0f, 0.0f);
    const Output second = run(ctx, c, 1.0f, 0.0f);
    EXPECT_TRUE(std::isfinite(first.result.loss_sum));
    EXPECT_EQ(first.result.loss_sum, second.result.loss_sum);
    EXPECT_EQ(first.d_x, second.d_x);
    EXPECT_EQ(first.d_weight, second.d_weight);
  }
}

TEST(CrossEntropy, NoTargetsGivesZero) {
  Case c({9, 8, 12}, 1.0f);
  std::fill(c.targets.begin(), c.targets.end(), -1);
  Context ctx(2);
  const Output out = run(ctx, c, 1.0f, 2.0f);
  EXPECT_EQ(out.result.tokens, 0);
  EXPECT_EQ(out.result.loss_sum, 0.0);
  EXPECT_EQ(out.d_x, std::vector<float>(c.x.size(), 0.0f));
  EXPECT_EQ(out.d_weight, std::vector<float>(c.weight.size(), 2.0f));
}

TEST(CrossEntropy, NanReachesTheLoss) {
  Case c({4, 8, 40}, 1.0f);
  c.x[0] = std::numeric_limits<float>::quiet_NaN();
  Context ctx(1);
  EXPECT_TRUE(std::isnan(run(ctx, c, 1.0f, 0.0f).result.loss_sum));
}

TEST(CrossEntropy, RefusesBadTargetsAndShapes) {
  Case c({4, 8, 12}, 1.0f);
  Context ctx(1);
  c.targets[2] = 12;
  EXPECT_THROW(run(ctx, c, 1.0f, 0.0f), Error);
  c.targets[2] = -2;
  EXPECT_THROW(run(ctx, c, 1.0f, 0.0f), Error);
  c.targets.pop_back();
  EXPECT_THROW(run(ctx, c, 1.0f, 0.0f), Error);
}

TEST(SoftmaxRow, ExponentialIsAccurate) {
  std::vector<float> row;
  for (int i = 0; i <= 20000; ++i) row.push_back(-86.9f * static_cast<float>(i) / 20000.0f);
  const std::vector<float> logits = row;
  const RowSoftmax softmax = exp_row(row.data(), static_cast<int64_t>(row.size()));
  EXPECT_EQ(softmax.max, 0.0f);
  double sum = 0.0;
  for (size_t i = 0; i < row.size(); ++i) {
    const double expected = std::exp(static_cast<double>(logits[i]));
    sum += expected;
    EXPECT_NEAR(row[i], expected, 2 * kEps * expected) << logits[i];
  }
  EXPECT_NEAR(softmax.sum, sum, 4 * kEps * sum);
}

// In whole vectors and behind them: logits far above the others leave exponentials of 0.
TEST(SoftmaxRow, TheMaximumIsFoundInEveryPlace) {
  for (const size_t n : {1u, 3u, 16u, 17u, 33u, 47u}) {
    for (size_t place = 0; place < n; ++place) {
      std::vector<float> row(n, -20.0f);
      row[place] = 200.0f;
      const RowSoftmax softmax = exp_row(row.data(), static_cast<int64_t>(n));
      EXPECT_EQ(softmax.max, 200.0f) << place << " of " << n;
      EXPECT_EQ(softmax.sum, 1.0) << place << " of " << n;
    }
  }
}

}  // namespace
}  // namespace twell
