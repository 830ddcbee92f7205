// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/adamw/adamw.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

namespace golden {
#include "twell/ops/adamw/adamw_golden.inc"
}

// Error of a float result after a handful of roundings of values of this magnitude.
constexpr double kUlps = 8 * std::numeric_limits<float>::epsilon();

struct State {
  explicit State(int64_t n, uint64_t seed = 1)
      : weight(static_cast<size_t>(n)), grad(weight), exp_avg(weight), exp_avg_sq(weight) {
    for (size_t i = 0; i < weight.size(); ++i) {
      weight[i] = normal(seed, 0, i);
      grad[i] = normal(seed, 1, i);
    }
  }
  AdamWParams params() { return {weight, grad, exp_avg, exp_avg_sq}; }
  std::vector<float> weight, grad, exp_avg, exp_avg_sq;
};

TEST(AdamW, MatchesTorchOverSteps) {
  Context ctx(1);
  State state(golden::kSize);
  state.weight.assign(std::begin(golden::kInitial), std::end(golden::kInitial));
  for (int step = 0; step < golden::kSteps; ++step) {
    for (int i = 0; i < golden::kSize; ++i) {
      state.grad[static_cast<size_t>(i)] = golden::kGrads[step * golden::kSize + i];
    }
    adamw_step(ctx, {.learning_rate = golden::kLearningRate[step], .step = step + 1},
               state.params());
    for (int i = 0; i < golden::kSize; ++i) {
      const double expected = golden::kWeights[step * golden::kSize + i];
      EXPECT_NEAR(state.weight[static_cast<size_t>(i)], expected,
                  kUlps * std::max(std::abs(expected), golden::kLearningRate[step]))
          << "step " << step << " element " << i;
    }
  }
  for (size_t i = 0; i < golden::kSize; ++i) {
    // Gradients that cancel leave an error of the largest term, at most 1 (1000 at element 5).
    const double magnitude = i == 5 ? 1000.0 : 1.0;
    EXPECT_NEAR(state.exp_avg[i], golden::kExpAvg[i], kUlps * magnitude);
    EXPECT_NEAR(state.exp_avg_sq[i], golden::kExpAvgSq[i], kUlps * golden::kExpAvgSq[i]);
  }
}

TEST(AdamW, MatchesDoubleReference) {
  constexpr int kSteps = 20;
  Context ctx(2);
  State state(1003);
  const std::vector<float> initial = state.weight;
  const AdamW base = {.learning_rate = 3e-3, .beta2 = 0.999, .grad_scale = 0.37};
  for (int step = 1; step <= kSteps; ++step) {
    for (size_t i = 0; i < state.grad.size(); ++i) {
      state.grad[i] = normal(5, static_cast<uint64_t>(step), i);
    }
    AdamW options = base;
    options.step = step;
    adamw_step(ctx, options, state.params());
  }
  for (size_t i = 0; i < initial.size(); ++i) {
    double w = initial[i], m = 0.0, v = 0.0;
    for (int step = 1; step <= kSteps; ++step) {
      const double g = base.grad_scale * normal(5, static_cast<uint64_t>(step), i);
      m = base.beta1 * m + (1 - base.beta1) * g;
      v = base.beta2 * v + (1 - base.beta2) * g * g;
      const double m_hat = m / (1 - std::pow(base.beta1, step));
      const double v_hat = v / (1 - std::pow(base.beta2, step));
      w -= base.learning_rate * base.weight_decay * w;
      w -= base.learning_rate * m_hat / (std::sqrt(v_hat) + base.eps);
    }
    // Each step rounds the weight once or twice.
    EXPECT_NEAR(state.weight[i], w, kUlps * kSteps * std::max(1.0, std::abs(w))) << i;
  }
}

// eps decides for gradients of its size: it is added to the root of the corrected second moment.
TEST(AdamW, EpsIsAddedBehindTheBiasCorrection) {
  constexpr int kSteps = 3;
  Context ctx(1);
  State state(300);
  const std::vector<float> initial = state.weight;
  const AdamW base = {.learning_rate = 0.1, .eps = 1e-3, .weight_decay = 0.0};
  const auto grad = [](int step, size_t i) {
    return 1e-3f * normal(5, static_cast<uint64_t>(step), i);
  };
  for (int step = 1; step <= kSteps; ++step) {
    for (size_t i = 0; i < state.grad.size(); ++i) state.grad[i] = grad(step, i);
    AdamW options = base;
    options.step = step;
    adamw_step(ctx, options, state.params());
  }
  for (size_t i = 0; i < initial.size(); ++i) {
    double w = initial[i], m = 0.0, v = 0.0;
    for (int step = 1; step <= kSteps; ++step) {
      const double g = grad(step, i);
      m = base.beta1 * m + (1 - base.beta1) * g;
      v = base.beta2 * v + (1 - base.beta2) * g * g;
      w -= base.learning_rate * m / (1 - std::pow(base.beta1, step)) /
           (std::sqrt(v / (1 - std::pow(base.beta2, step))) + base.eps);
    }
    EXPECT_NEAR(state.weight[i], w, kUlps * kSteps * std::max(1.0, std::abs(w))) << i;
  }
}

bool is_bf16(float value) { return (std::bit_cast<uint32_t>(value) & 0xffffu) == 0; }

// To nearest, v would stay at 1: 0.1% is below half of bf16's last place.
TEST(AdamW, RoundedMomentsDecay) {
  constexpr int kSteps = 1000;
  constexpr int64_t kSize = 2048;
  Context ctx(1);
  State state(kSize);
  state.grad.assign(kSize, 0.0f);
  state.exp_avg.assign(kSize, 1.0f);
  state.exp_avg_sq.assign(kSize, 1.0f);
  AdamWParams params = state.params();
  params.round_moments = true;
  for (int step = 1; step <= kSteps; ++step) {
    adamw_step(ctx, {.beta1 = 0.999, .beta2 = 0.999, .step = step}, params);
  }
  // A value's error is a sum of roundings, each with a deviation of at most half of a last place,
  // 1/256 of the value then. The mean over 2,048 independent values deviates far less than this.
  const double expected = std::pow(0.999, kSteps);
  for (const std::vector<float>* moment : {&state.exp_avg, &state.exp_avg_sq}) {
    double sum = 0.0;
    for (const float value : *moment) {
      EXPECT_TRUE(is_bf16(value));
      sum += value;
    }
    EXPECT_NEAR(sum / kSize, expected, 0.01 * expected);
  }
  // Each moment is rounded with random bits of its own, or both would be the same here.
  int64_t differ = 0;
  for (size_t i = 0; i < kSize; ++i) differ += state.exp_avg[i] != state.exp_avg_sq[i];
  EXPECT_GT(differ, kSize / 2);
}

TEST(AdamW, RoundingDependsOnSeedStepAndPlaceAlone) {
  constexpr int64_t kSize = (1 << 15) + 13;
  const auto step = [](Context& ctx, uint64_t seed, int64_t cut, int64_t number) {
    State state(kSize);
    const AdamWParams all = state.params();
    for (int64_t begin = 0; begin < kSize; begin += cut) {
      const auto part = [&](auto span) {
        return span.subspan(static_cast<size_t>(begin),
                            static_cast<size_t>(std::min(cut, kSize - begin)));
      };
      adamw_step(ctx, {.step = number},
                 {part(all.weight), part(all.grad), part(all.exp_avg), part(all.exp_avg_sq), true,
                  seed, begin});
    }
    state.exp_avg.insert(state.exp_avg.end(), state.exp_avg_sq.begin(), state.exp_avg_sq.end());
    return state.exp_avg;
  };
  Context ctx1(1), ctx3(3);
  const std::vector<float> once = step(ctx1, 7, kSize, 5);
  EXPECT_EQ(once, step(ctx3, 7, kSize, 5));
  EXPECT_EQ(once, step(ctx1, 7, 1003, 5));
  EXPECT_NE(once, step(ctx1, 8, kSize, 5));
  EXPECT_NE(once, step(ctx1, 7, kSize, 6));
}

TEST(AdamW, SameBitsForAnyThreadCountAndSplit) {
  const int64_t n = (1 << 16) + 37;
  State one(n), three(n), pieces(n);
  Context ctx1(1), ctx3(3);
  adamw_step(ctx1, {}, one.params());
  adamw_step(ctx3, {}, three.params());
  EXPECT_EQ(one.weight, three.weight);
  EXPECT_EQ(one.exp_avg, three.exp_avg);
  EXPECT_EQ(one.exp_avg_sq, three.exp_avg_sq);
  const AdamWParams all = pieces.params();
  for (size_t begin = 0; begin < all.weight.size(); begin += 1001) {
    const size_t count = std::min<size_t>(1001, all.weight.size() - begin);
    adamw_step(ctx1, {},
               {all.weight.subspan(begin, count), all.grad.subspan(begin, count),
                all.exp_avg.subspan(begin, count), all.exp_avg_sq.subspan(begin, count)});
  }
  EXPECT_EQ(one.weight, pieces.weight);
}

TEST(AdamW, ZeroGradientOnlyDecays) {
  Context ctx(1);
  State state(5);
  state.grad.assign(5, 0.0f);
  const std::vector<float> before = state.weight;
  adamw_step(ctx, {.learning_rate = 0.5, .weight_decay = 0.5}, state.params());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_FLOAT_EQ(state.weight[i], 0.75f * before[i]);
}

TEST(AdamW, RefusesMismatchedSizes) {
  Context ctx(1);
  State state(8);
  AdamWParams params = state.params();
  params.grad = params.grad.first(7);
  EXPECT_THROW(adamw_step(ctx, {}, params), Error);
  EXPECT_THROW(adamw_step(ctx, {.step = 0}, state.params()), Error);
}

TEST(GlobalNorm, MatchesDoubleSumForAnyThreadCount) {
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{31}, int64_t{16384}, int64_t{200001}}) {
    const State state(n);
    double sum = 0.0;
    for (const float g : state.grad) sum += static_cast<double>(g) * static_cast<double>(g);
    Context ctx1(1), ctx2(2), ctx3(3);
    const double norm = global_norm(ctx1, state.grad);
    EXPECT_NEAR(norm, std::sqrt(sum), 1e-12 * std::sqrt(sum));
    EXPECT_EQ(norm, global_norm(ctx2, state.grad));
    EXPECT_EQ(norm, global_norm(ctx3, state.grad));
  }
}

TEST(GlobalNorm, PropagatesNanAndDoesNotOverflow) {
  Context ctx(1);
  const std::vector<float> huge(100, 3e38f);
  EXPECT_NEAR(global_norm(ctx, huge), 3e39, 3e39 * kUlps);
  std::vector<float> bad(100, 1.0f);
  bad[57] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(global_norm(ctx, bad)));
}

}  // namespace
}  // namespace twell
