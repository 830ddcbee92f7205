// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/ffn_train.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "twell/base/error.h"
#include "twell/ops/ffn_train/ffn_train_cpu.h"
#include "twell/ops/ffn_train/ffn_train_reference.h"

namespace twell {
namespace {

using reference::Problem;
using reference::Tracked;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> narrowed(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// One layer in float, with poisoned outputs and gradients that start at kStart.
struct Layer {
  static constexpr float kStart = 0.25f;

  explicit Layer(const Problem& p)
      : problem(p),
        x(narrowed(p.x)),
        d_y(narrowed(p.d_y)),
        w_gate(narrowed(p.w_gate)),
        w_up(narrowed(p.w_up)),
        w_down(narrowed(p.w_down)),
        y(x.size(), kNan),
        d_x(x.size(), kNan),
        d_w_gate(w_gate.size(), kStart),
        d_w_up(w_up.size(), kStart),
        d_w_down(w_down.size(), kStart),
        active(static_cast<size_t>(p.ffn)) {}

  template <typename T>
  static Matrix<T> view(std::vector<std::remove_const_t<T>>& v, int64_t rows, int64_t cols) {
    return v.empty() ? Matrix<T>() : Matrix<T>(v.data(), rows, cols);
  }
  FfnWeights weights() {
    const int64_t f = problem.ffn, d = problem.width;
    return {view<const float>(w_gate, f, d), view<const float>(w_up, f, d),
            view<const float>(w_down, f, d), problem.f};
  }
  FfnGrads grads() {
    const int64_t f = problem.ffn, d = problem.width;
    return {view<float>(d_w_gate, f, d), view<float>(d_w_up, f, d), view<float>(d_w_down, f, d)};
  }
  // Tokens [begin, begin + count), with saved activations of their own.
  void run(Context& ctx, FfnTrainPolicy policy, int64_t begin, int64_t count, FfnSaved& saved) {
    const auto rows = [&](std::vector<float>& v) {
      return view<float>(v, problem.tokens, problem.width).slice_rows(begin, count);
    };
    stats = ffn_train_forward(
        ctx, {.weights = weights(), .x = rows(x), .y = rows(y), .policy = policy, .active = active},
        saved);
    ffn_train_backward(ctx,
                       {.weights = weights(),
                        .x = rows(x),
                        .d_y = rows(d_y),
                        .l1_scale = static_cast<float>(problem.l1_scale),
                        .d_x = rows(d_x),
                        .grads = grads()},
                       saved);
  }
  void run(Context& ctx, FfnTrainPolicy policy) {
    FfnSaved saved(problem.tokens, problem.ffn, problem.gated);
    run(ctx, policy, 0, problem.tokens, saved);
  }

  Problem problem;
  std::vector<float> x, d_y, w_gate, w_up, w_down;
  std::vector<float> y, d_x, d_w_gate, d_w_up, d_w_down;
  std::vector<uint8_t> active;
  FfnTrainStats stats;
};

// Every value is a sum of products of sums: its error is that of the longest chain of additions,
// in random-walk growth, times the magnitudes that went in.
double relative_tolerance(const Problem& p) {
  constexpr double kEps = std::numeric_limits<float>::epsilon();
  const double terms = static_cast<double>(p.width + p.ffn + p.tokens);
  return kEps * (8.0 + 2.0 * std::sqrt(terms));
}

void expect_near(const std::vector<float>& actual, const std::vector<Tracked>& expected,
                 double start, double tolerance, const std::string& name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double want = expected[i].value + start;
    const double bound = tolerance * (expected[i].magnitude + start);
    // Negated, so that NaN fails; the first failure says enough.
    if (!(std::abs(static_cast<double>(actual[i]) - want) <= bound)) {
      FAIL() << name << "[" << i << "] is " << actual[i] << ", expected " << want << " +- "
             << bound;
    }
  }
}

void expect_matches(const Layer& layer, const reference::Result& expected) {
  const double tolerance = relative_tolerance(layer.problem);
  expect_near(layer.y, expected.y, 0, tolerance, "y");
  expect_near(layer.d_x, expected.d_x, 0, tolerance, "d_x");
  expect_near(layer.d_w_gate, expected.d_w_gate, Layer::kStart, tolerance, "d_w_gate");
  expect_near(layer.d_w_up, expected.d_w_up, Layer::kStart, tolerance, "d_w_up");
  expect_near(layer.d_w_down, expected.d_w_down, Layer::kStart, tolerance, "d_w_down");
  EXPECT_EQ(layer.active, expected.active);
}

void expect_stats(const FfnTrainStats& stats, const Problem& p, const reference::Result& expected) {
  EXPECT_EQ(stats.tokens, p.tokens);
  EXPECT_EQ(stats.nnz,
            std::accumulate(expected.row_nnz.begin(), expected.row_nnz.end(), int64_t{0}));
  EXPECT_EQ(stats.max_row_nnz, *std::max_element(expected.row_nnz.begin(), expected.row_nnz.end()));
  EXPECT_NEAR(stats.l1_sum, expected.l1_sum.value,
              relative_tolerance(p) * expected.l1_sum.magnitude);
}

struct Case {
  std::string name;
  int64_t tokens, width, ffn;
  // Active neurons of token m.
  int64_t (*row_nnz)(int64_t m, int64_t ffn);
};

int64_t none(int64_t, int64_t) { return 0; }
int64_t all(int64_t, int64_t ffn) { return ffn; }
int64_t few(int64_t m, int64_t ffn) { return m % std::max<int64_t>(1, ffn / 8); }
int64_t below_width(int64_t, int64_t ffn) { return ffn / 4 - 1; }
int64_t at_width(int64_t, int64_t ffn) { return ffn / 4; }
int64_t above_width(int64_t, int64_t ffn) { return ffn / 4 + 1; }
int64_t around_width(int64_t m, int64_t ffn) { return ffn / 4 - 1 + m % 3; }
int64_t one_full_row(int64_t m, int64_t ffn) { return m == 1 ? ffn : m % 5; }
int64_t third_full(int64_t m, int64_t ffn) { return m % 3 == 0 ? ffn : m % 7; }

class FfnTrain : public testing::TestWithParam<std::tuple<Case, bool>> {
 public:
  static void expect_reference(Problem p);
};

TEST_P(FfnTrain, BothExecutionsMatchTheReference) {
  const auto& [c, gated] = GetParam();
  Problem p =
      reference::make_problem(c.tokens, c.width, c.ffn, gated,
                              [&, fn = c.row_nnz, ffn = c.ffn](int64_t m) { return fn(m, ffn); });
  expect_reference(p);
  if (c.tokens >= 10000 || c.ffn >= 10000) return;
  p.f.kind = Activation::kRelu2;
  expect_reference(p);
  p.f = {.kind = Activation::kFatRelu, .threshold = 0.1f};
  expect_reference(p);
  if (!gated) return;
  p.f = {.kind = Activation::kDRelu};
  expect_reference(p);
}

void FfnTrain::expect_reference(Problem p) {
  for (const double l1_scale : {0.0, 0.3}) {
    p.l1_scale = static_cast<double>(static_cast<float>(l1_scale));
    const reference::Result expected = reference::run(p);
    for (const FfnTrainPolicy policy : {FfnTrainPolicy::kDense, FfnTrainPolicy::kHybrid}) {
      SCOPED_TRACE(policy == FfnTrainPolicy::kDense ? "dense" : "hybrid");
      Context ctx(2);
      Layer layer(p);
      layer.run(ctx, policy);
      expect_matches(layer, expected);
      expect_stats(layer.stats, p, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, FfnTrain,
    testing::Combine(
        testing::Values(Case{"one_token", 1, 16, 48, few}, Case{"one_empty_token", 1, 8, 64, none},
                        Case{"one_full_token", 1, 8, 64, all}, Case{"all_empty", 127, 24, 64, none},
                        Case{"all_full", 129, 24, 64, all},
                        Case{"below_width", 129, 24, 104, below_width},
                        Case{"at_width", 127, 40, 104, at_width},
                        Case{"above_width", 129, 24, 104, above_width},
                        Case{"around_width", 127, 24, 72, around_width},
                        Case{"one_full_row", 129, 40, 200, one_full_row},
                        Case{"third_full", 129, 72, 96, third_full}, Case{"few", 700, 136, 96, few},
                        Case{"wide_ffn", 3, 24, 8200, few}, Case{"tiny", 5, 8, 8, around_width},
                        Case{"odd_ffn", 129, 24, 83, around_width},
                        Case{"odd_ffn_third_full", 127, 24, 83, third_full}),
        testing::Bool()),
    [](const auto& suite_info) {
      return std::get<0>(suite_info.param).name +
             (std::get<1>(suite_info.param) ? "_gated" : "_plain");
    });

INSTANTIATE_TEST_SUITE_P(
    Large, FfnTrain,
    testing::Combine(testing::Values(Case{"tokens_beyond_65536", 65600, 8, 16, few},
                                     Case{"ffn_beyond_65536", 3, 8, 65544, one_full_row}),
                     testing::Bool()),
    [](const auto& suite_info) {
      return std::get<0>(suite_info.param).name +
             (std::get<1>(suite_info.param) ? "_gated" : "_plain");
    });

// NaN in a token reaches that token's whole result, and no other token. The gradients of the
// weights are sums over tokens, so that they are NaN and stop the run.
TEST(FfnTrainNan, ReachesItsTokenAndTheGradients) {
  constexpr int64_t kWidth = 24, kFfn = 83, kBad = 7;
  for (const bool gated : {true, false}) {
    const Problem p =
        reference::make_problem(40, kWidth, kFfn, gated, [](int64_t m) { return few(m, kFfn); });
    const reference::Result finite = reference::run(p);
    for (const FfnTrainPolicy policy : {FfnTrainPolicy::kDense, FfnTrainPolicy::kHybrid}) {
      Context ctx(2);
      Layer layer(p);
      layer.x[kBad * kWidth + 5] = kNan;
      layer.run(ctx, policy);
      for (size_t i = 0; i < layer.y.size(); ++i) {
        if (i / kWidth == kBad) {
          ASSERT_TRUE(std::isnan(layer.y[i])) << i;
        } else {
          ASSERT_NEAR(layer.y[i], finite.y[i].value, relative_tolerance(p) * finite.y[i].magnitude);
        }
      }
      EXPECT_EQ(layer.stats.max_row_nnz, kFfn);
      EXPECT_TRUE(std::isnan(layer.d_w_up[5]) && std::isnan(layer.d_w_down[0]));
    }
  }
}

TEST(FfnTrainReference, GradientsMatchFiniteDifferences) {
  const BlendedActivation kinds[] = {
      {},
      {.kind = Activation::kRelu2},
      {.kind = Activation::kFatRelu, .threshold = 0.1f},
      {.kind = Activation::kDRelu},
      {.kind = Activation::kSilu, .relu_share = 0.3f},
      {.kind = Activation::kGelu},
      {.kind = Activation::kGeluTanh, .relu_share = 0.6f},
      {.kind = Activation::kQuickGelu},
  };
  for (int kind = 0; kind < 2 * static_cast<int>(std::size(kinds)); ++kind) {
    const bool gated = kind % 2 == 0;
    Problem p = reference::make_problem(4, 8, 12, gated, [](int64_t m) { return 3 * m; });
    p.l1_scale = 0.7;
    p.f = kinds[kind / 2];
    if (p.f.is_drelu() && !gated) continue;
    if (p.f.kind != Activation::kRelu) {
      for (int64_t j = 0; j < 12; ++j) {
        if (gated) p.b_gate.push_back(static_cast<double>(j % 3 - 1) / 64.0);
        p.b_up.push_back(gated ? 0.1 * static_cast<double>(j) : static_cast<double>(j % 3) / 64.0);
      }
      for (int64_t d = 0; d < 8; ++d) p.b_down.push_back(0.2 * static_cast<double>(d));
    }
    const reference::Result r = reference::run(p);
    const auto check = [&](std::vector<double>& values, const std::vector<Tracked>& gradient,
                           const std::string& name) {
      constexpr double kStep = 1e-6;  // below the gates' distance from zero
      for (size_t i = 0; i < values.size(); ++i) {
        const double value = values[i];
        values[i] = value + kStep;
        const double plus = reference::objective(p);
        values[i] = value - kStep;
        const double minus = reference::objective(p);
        values[i] = value;
        EXPECT_NEAR(gradient[i].value, (plus - minus) / (2 * kStep), 1e-6) << name << i;
      }
    };
    check(p.x, r.d_x, "x");
    check(p.w_gate, r.d_w_gate, "w_gate");
    check(p.w_up, r.d_w_up, "w_up");
    check(p.w_down, r.d_w_down, "w_down");
    check(p.b_gate, r.d_b_gate, "b_gate");
    check(p.b_up, r.d_b_up, "b_up");
    check(p.b_down, r.d_b_down, "b_down");
  }
}

TEST(FfnTrainHybrid, StatisticsSayWhatRan) {
  struct {
    int64_t heavy_rows;
    FfnTrainExecution execution;
  } const cases[] = {{0, FfnTrainExecution::kHybrid},
                     {1, FfnTrainExecution::kHybrid},
                     {32, FfnTrainExecution::kHybrid},
                     {128, FfnTrainExecution::kDense}};  // more than the tail holds
  for (const bool gated : {true, false}) {
    for (const auto& c : cases) {
      const Problem p = reference::make_problem(
          128, 8, 64, gated, [&](int64_t m) { return m < c.heavy_rows ? 17 : 16; });
      Context ctx(2);
      Layer layer(p);
      layer.run(ctx, FfnTrainPolicy::kHybrid);
      EXPECT_EQ(layer.stats.execution, c.execution);
      EXPECT_EQ(layer.stats.nnz, 128 * 16 + c.heavy_rows);
      if (c.execution == FfnTrainExecution::kHybrid) {
        EXPECT_EQ(layer.stats.tail_rows, c.heavy_rows);
      }
    }
  }
}

// Heavy rows in more than one chunk, and compact ones in more than one span of tokens.
TEST(FfnTrainHybrid, HeavyRowsBeyondAChunkMatchTheReference) {
  constexpr int64_t kTokens = 2340, kFfn = 48;
  for (const bool gated : {true, false}) {
    Problem p = reference::make_problem(
        kTokens, 8, kFfn, gated, [](int64_t m) { return m % 4 == 1 ? kFfn - m % 3 : m % 11; });
    p.l1_scale = static_cast<double>(0.3f);
    const reference::Result expected = reference::run(p);
    Context ctx(2);
    Layer layer(p);
    layer.run(ctx, FfnTrainPolicy::kHybrid);
    EXPECT_EQ(layer.stats.execution, FfnTrainExecution::kHybrid);
    EXPECT_EQ(layer.stats.tail_rows, kTokens / 4);
    EXPECT_GT(layer.stats.tail_rows, kDenseChunk);
    expect_matches(layer, expected);
    expect_stats(layer.stats, p, expected);
  }
}

std::vector<float> unpacked(const HybridF32& hybrid) {
  const HybridShape& shape = hybrid.shape;
  std::vector<float> dense(static_cast<size_t>(shape.rows * shape.cols));
  for (int64_t m = 0; m < shape.rows; ++m) {
    float* const row = dense.data() + m * shape.cols;
    if (!hybrid.is_compact(m)) {
      std::copy_n(hybrid.tail.row(hybrid.tail_slot[m]), shape.cols, row);
      continue;
    }
    for (int64_t entry = 0; entry < hybrid.row_nnz[m]; ++entry) {
      EXPECT_TRUE(entry == 0 || hybrid.index(m, entry - 1) < hybrid.index(m, entry));
      row[hybrid.index(m, entry)] = hybrid.value(m, entry);
    }
  }
  return dense;
}

// The saved pattern is that of relu(x w_gate^T), columns ascending, heavy rows in order in the
// tail.
TEST(FfnTrainHybrid, SavedPatternMatchesTheFormat) {
  const Problem p =
      reference::make_problem(70, 8, 64, true, [](int64_t m) { return m % 10 == 0 ? 64 : m % 17; });
  Context ctx(2);
  Layer layer(p);
  FfnSaved saved(70, 64, true);
  layer.run(ctx, FfnTrainPolicy::kHybrid, 0, 70, saved);
  const std::vector<float> restored = unpacked(saved.hybrid);
  int32_t heavy = 0;
  for (int64_t m = 0; m < 70; ++m) {
    EXPECT_EQ(saved.hybrid.tail_slot[m],
              saved.hybrid.row_nnz[m] > saved.hybrid.shape.ell_width ? heavy++ : -1);
    for (int64_t j = 0; j < 64; ++j) {
      const Tracked gate = reference::dot(p.x, m, p.w_gate, j, 8);
      const double g = std::max(0.0, gate.value);
      EXPECT_NEAR(restored[reference::at(m, 64, j)], g, relative_tolerance(p) * gate.magnitude);
    }
  }
}

TEST(FfnTrainHybrid, PlanStaysWithinTheDensePlan) {
  for (const bool gated : {true, false}) {
    for (const int64_t tokens : {1, 5, 127, 129, 4096}) {
      for (const int64_t ffn : {8, 16, 104, 1024, 5632}) {
        FfnSaved saved(tokens, ffn, gated);
        if (!saved.plan_hybrid(tokens)) continue;
        const HybridShape& shape = saved.hybrid.shape;
        const auto bytes = [](int64_t values) {
          constexpr int64_t kAlign = static_cast<int64_t>(kAlignment);
          return (4 * values + kAlign - 1) / kAlign * kAlign;
        };
        const int64_t compact = bytes(shape.rows * shape.ell_width);
        const int64_t tail = bytes(shape.tail_capacity * shape.cols);
        EXPECT_LE(2 * bytes(shape.rows) + compact + (gated ? 2 : 1) * (compact + tail),
                  FfnSaved::bytes(tokens, ffn, gated));
        if (tokens >= 127 && ffn >= 104) {
          EXPECT_GE(saved.hybrid.shape.tail_capacity, tokens / 4);
        }
      }
    }
  }
}

TEST(FfnTrainBatches, MicroBatchesAccumulate) {
  Problem p = reference::make_problem(50, 24, 64, true, [](int64_t m) { return m % 20; });
  p.l1_scale = 0.5;
  const reference::Result expected = reference::run(p);
  Context ctx(2);
  Layer layer(p);
  FfnSaved saved(32, p.ffn, p.gated);
  layer.run(ctx, FfnTrainPolicy::kHybrid, 0, 32, saved);
  layer.run(ctx, FfnTrainPolicy::kDense, 32, 1, saved);
  layer.run(ctx, FfnTrainPolicy::kHybrid, 33, 17, saved);
  expect_matches(layer, expected);
}

TEST(FfnTrainBatches, RepeatsBitForBit) {
  Problem p = reference::make_problem(333, 40, 128, true, [](int64_t m) { return m % 40; });
  p.l1_scale = 0.5;
  for (const FfnTrainPolicy policy : {FfnTrainPolicy::kDense, FfnTrainPolicy::kHybrid}) {
    for (const int threads : {1, 2, 3}) {
      Context ctx(threads);
      Layer first(p), second(p);
      first.run(ctx, policy);
      second.run(ctx, policy);
      EXPECT_EQ(first.y, second.y);
      EXPECT_EQ(first.d_x, second.d_x);
      EXPECT_EQ(first.d_w_gate, second.d_w_gate);
      EXPECT_EQ(first.d_w_up, second.d_w_up);
      EXPECT_EQ(first.d_w_down, second.d_w_down);
      EXPECT_EQ(first.stats.l1_sum, second.stats.l1_sum);
    }
  }
}

TEST(FfnTrainContract, RefusesWhatDoesNotFit) {
  Context ctx(1);
  const Problem p = reference::make_problem(4, 8, 16, true, [](int64_t) { return 2; });
  Layer layer(p);
  FfnSaved short_of_tokens(3, 16, true);
  EXPECT_THROW(layer.run(ctx, FfnTrainPolicy::kDense, 0, 4, short_of_tokens), Error);
  FfnSaved not_gated(4, 16, false);
  EXPECT_THROW(layer.run(ctx, FfnTrainPolicy::kDense, 0, 4, not_gated), Error);
  FfnSaved other_ffn(4, 24, true);
  EXPECT_THROW(layer.run(ctx, FfnTrainPolicy::kDense, 0, 4, other_ffn), Error);
}

TEST(FfnTrainPolicies, AutoFollowsTheHint) {
  const auto choose = [](double nnz_hint) {
    return choose_ffn_train_execution(2048, 256, 1024, nnz_hint);
  };
  EXPECT_EQ(choose(-1.0), FfnTrainExecution::kDense);
  EXPECT_EQ(choose(0.0), FfnTrainExecution::kHybrid);
  EXPECT_EQ(choose(50.0), FfnTrainExecution::kHybrid);
  EXPECT_EQ(choose(512.0), FfnTrainExecution::kDense);
  EXPECT_EQ(choose_ffn_train_execution(1, 256, 1024, 10.0), FfnTrainExecution::kDense);
}

TEST(FfnTrainPolicies, Names) {
  EXPECT_EQ(parse_ffn_train_policy("auto"), FfnTrainPolicy::kAuto);
  EXPECT_EQ(parse_ffn_train_policy("dense"), FfnTrainPolicy::kDense);
  EXPECT_EQ(parse_ffn_train_policy("hybrid"), FfnTrainPolicy::kHybrid);
  EXPECT_THROW(parse_ffn_train_policy("sparse"), InputError);
  EXPECT_EQ(ffn_train_execution_name(FfnTrainExecution::kHybrid), "hybrid");
}

}  // namespace
}  // namespace twell
