// SPDX-License-Identifier: Apache-2.0
// The layer with an activation other than ReLU, against a double program: values, gradients, and
// what it reports.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/test_matrix.h"
#include "twell/ops/ffn_train/ffn_train.h"

namespace twell {
namespace {

using Rows = std::vector<std::vector<double>>;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

double value(const BlendedActivation& f, double x) {
  const double share = static_cast<double>(f.relu_share);
  const double smooth = f.kind == Activation::kSilu ? x * sigmoid(x) : x * normal_cdf(x);
  return share * std::max(x, 0.0) + (1.0 - share) * smooth;
}

double slope(const BlendedActivation& f, double x) {
  const double share = static_cast<double>(f.relu_share), s = sigmoid(x);
  const double density = std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::acos(-1.0));
  const double smooth =
      f.kind == Activation::kSilu ? s + x * s * (1.0 - s) : normal_cdf(x) + x * density;
  return share * (x > 0.0 ? 1.0 : 0.0) + (1.0 - share) * smooth;
}

Rows rows_of(const TestMatrix& m) {
  Rows out(static_cast<size_t>(m.rows()), std::vector<double>(static_cast<size_t>(m.cols())));
  for (size_t r = 0; r < out.size(); ++r) {
    for (size_t c = 0; c < out[r].size(); ++c) {
      out[r][c] = static_cast<double>(m(static_cast<int64_t>(r), static_cast<int64_t>(c)));
    }
  }
  return out;
}

// out += scale * in
void add(std::vector<double>& out, double scale, const std::vector<double>& in) {
  for (size_t i = 0; i < out.size(); ++i) out[i] += scale * in[i];
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

struct SmoothProblem {
  static constexpr int64_t kTokens = 600, kWidth = 24, kFfn = 40;  // two chunks of tokens

  explicit SmoothProblem(bool gated_in, BlendedActivation f_in) : gated(gated_in), f(f_in) {
    for (int64_t i = 0; i < kTokens * kWidth; ++i) x.data()[i] *= 2.0f;
  }
  FfnWeights weights() const {
    return {gated ? w_gate.view() : ConstMatrixF(), w_up.view(), w_down.view(), f};
  }

  bool gated;
  BlendedActivation f;
  float l1 = 0.05f;
  TestMatrix x = TestMatrix::random(kTokens, kWidth, 1),
             d_y = TestMatrix::random(kTokens, kWidth, 2);
  TestMatrix w_gate = TestMatrix::random(kFfn, kWidth, 3);
  TestMatrix w_up = TestMatrix::random(kFfn, kWidth, 4);
  TestMatrix w_down = TestMatrix::random(kFfn, kWidth, 5);
};

struct Expected {
  Rows y, d_x, d_gate, d_up, d_down;
  double l1_sum = 0.0;
  int64_t nnz = 0, faint = 0;  // faint: of those, too small for float to hold for certain
};

Expected reference(const SmoothProblem& p) {
  const Rows x = rows_of(p.x), d_y = rows_of(p.d_y), w_up = rows_of(p.w_up),
             w_down = rows_of(p.w_down), firing = p.gated ? rows_of(p.w_gate) : w_up;
  const Rows tokens(x.size(), std::vector<double>(SmoothProblem::kWidth));
  const Rows neurons(w_up.size(), std::vector<double>(SmoothProblem::kWidth));
  Expected e{tokens, tokens, neurons, neurons, neurons};
  Rows& d_firing = p.gated ? e.d_gate : e.d_up;
  for (size_t m = 0; m < x.size(); ++m) {
    for (size_t j = 0; j < firing.size(); ++j) {
      const double z = dot(x[m], firing[j]), g = value(p.f, z);
      const double u = p.gated ? dot(x[m], w_up[j]) : 1.0, h = g * u;
      e.nnz += p.f.relu_share > 0.0f ? z > 0.0 : g != 0.0;
      e.faint += p.f.relu_share > 0.0f ? std::abs(z) < 1e-5 : std::abs(g) < 1e-30;
      e.l1_sum += std::abs(h);
      add(e.y[m], h, w_down[j]);
      const double d_h = dot(d_y[m], w_down[j]) + static_cast<double>(p.l1) * (h > 0.0 ? 1 : -1);
      add(e.d_down[j], h, d_y[m]);
      const double d_z = d_h * u * slope(p.f, z);
      add(e.d_x[m], d_z, firing[j]);
      add(d_firing[j], d_z, x[m]);
      if (!p.gated) continue;
      add(e.d_x[m], d_h * g, w_up[j]);
      add(e.d_up[j], d_h * g, x[m]);
    }
  }
  return e;
}

// In norm: a sum of n products in float32 is off by about eps * sqrt(n), and the longest chain here
// is one over the tokens behind one over the neurons.
void expect_near(const TestMatrix& actual, const Rows& expected, const char* name) {
  double error = 0.0, total = 0.0;
  for (size_t r = 0; r < expected.size(); ++r) {
    for (size_t c = 0; c < expected[r].size(); ++c) {
      const double got =
          static_cast<double>(actual(static_cast<int64_t>(r), static_cast<int64_t>(c)));
      error += (got - expected[r][c]) * (got - expected[r][c]);
      total += expected[r][c] * expected[r][c];
    }
  }
  const double tolerance =
      0x1p-23 * (std::sqrt(SmoothProblem::kTokens) + std::sqrt(SmoothProblem::kFfn));
  EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(total)) << name;
}

void zero(TestMatrix& m) { std::fill_n(m.data(), m.rows() * m.cols(), 0.0f); }

class FfnTrainSmooth : public ::testing::TestWithParam<std::tuple<Activation, float, bool>> {};

TEST_P(FfnTrainSmooth, MatchesTheDoubleProgramWhateverThePolicy) {
  const auto& [kind, share, gated] = GetParam();
  const SmoothProblem p(gated, {kind, share});
  const Expected e = reference(p);
  for (const FfnTrainPolicy policy : {FfnTrainPolicy::kAuto, FfnTrainPolicy::kHybrid}) {
    Context ctx(2);
    FfnSaved saved(SmoothProblem::kTokens, SmoothProblem::kFfn, gated);
    TestMatrix y(SmoothProblem::kTokens, SmoothProblem::kWidth),
        d_x(SmoothProblem::kTokens, SmoothProblem::kWidth);
    TestMatrix d_gate(SmoothProblem::kFfn, SmoothProblem::kWidth), d_up = d_gate, d_down = d_gate;
    for (TestMatrix* d : {&d_gate, &d_up, &d_down}) zero(*d);
    std::vector<uint8_t> active(SmoothProblem::kFfn);
    const FfnTrainStats stats = ffn_train_forward(ctx,
                                                  {.weights = p.weights(),
                                                   .x = p.x.view(),
                                                   .y = y.view(),
                                                   .policy = policy,
                                                   .nnz_hint = 1.0,
                                                   .active = active},
                                                  saved);
    ffn_train_backward(ctx,
                       {.weights = p.weights(),
                        .x = p.x.view(),
                        .d_y = p.d_y.view(),
                        .l1_scale = p.l1,
                        .d_x = d_x.view(),
                        .grads = {gated ? d_gate.view() : MatrixF(), d_up.view(), d_down.view()}},
                       saved);
    expect_near(y, e.y, "y");
    expect_near(d_x, e.d_x, "d_x");
    if (gated) expect_near(d_gate, e.d_gate, "d_gate");
    expect_near(d_up, e.d_up, "d_up");
    expect_near(d_down, e.d_down, "d_down");
    EXPECT_EQ(stats.execution, FfnTrainExecution::kDense);
    EXPECT_NEAR(stats.l1_sum, e.l1_sum, 1e-5 * e.l1_sum);
    EXPECT_LE(stats.nnz, e.nnz + e.faint);
    EXPECT_GE(stats.nnz, e.nnz - e.faint);
    EXPECT_EQ(active, std::vector<uint8_t>(SmoothProblem::kFfn, 1));
  }
}

TEST(FfnTrainSmooth, AWholeReluShareIsTheReluLayer) {
  const SmoothProblem relu(true, {}), blend(true, {Activation::kSilu, 1.0f});
  Context ctx(2);
  TestMatrix expected(SmoothProblem::kTokens, SmoothProblem::kWidth), y = expected;
  FfnSaved saved(SmoothProblem::kTokens, SmoothProblem::kFfn, true);
  ffn_train_forward(ctx, {.weights = relu.weights(), .x = relu.x.view(), .y = expected.view()},
                    saved);
  ffn_train_forward(ctx, {.weights = blend.weights(), .x = relu.x.view(), .y = y.view()}, saved);
  EXPECT_TRUE(y.same_bits(expected));
}

INSTANTIATE_TEST_SUITE_P(Kinds, FfnTrainSmooth,
                         ::testing::Combine(::testing::Values(Activation::kSilu, Activation::kGelu),
                                            ::testing::Values(0.0f, 0.4f), ::testing::Bool()));

}  // namespace
}  // namespace twell
