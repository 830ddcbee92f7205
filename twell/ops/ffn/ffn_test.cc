// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/base/test_matrix.h"

namespace twell {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr FfnPolicy kPolicies[] = {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse,
                                   FfnPolicy::kRowFused, FfnPolicy::kTileUnion};

// A layer whose gate fires with a chosen frequency: x has a constant last component that the gate
// weights turn into a negative bias. Row `heavy` has the constant's sign turned: it fires densely.
struct Layer {
  Layer(int64_t m_in, int64_t d_in, int64_t f_in, bool gated_in, float bias, int64_t heavy = -1)
      : m(m_in), d(d_in), f(f_in), gated(gated_in), x(m * d), gate(f * d), up(f * d), down(f * d) {
    fill(x, 1, 1.0f);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    fill(gate, 2, scale);
    fill(up, 3, scale);
    fill(down, 4, scale);
    Buffer<float>& firing = gated ? gate : up;
    for (int64_t n = 0; n < f; ++n) firing[n * d + d - 1] = -bias;
    for (int64_t row = 0; row < m; ++row) x[row * d + d - 1] = row == heavy ? -1.0f : 1.0f;
  }
  static void fill(Buffer<float>& out, uint64_t seed, float scale) {
    for (int64_t i = 0; i < out.size(); ++i) {
      out[i] = scale * normal(seed, 0, static_cast<uint64_t>(i));
    }
  }
  FfnWeights weights() const {
    FfnWeights out{{}, up.matrix(f, d), down.matrix(f, d)};
    if (gated) out.w_gate = gate.matrix(f, d);
    out.activation = {.kind = activation, .threshold = threshold};
    return out;
  }
  Buffer<float> run(FfnPolicy policy, int threads, FfnPlan* plan_out = nullptr,
                    std::span<int32_t> row_nnz = {}) const {
    Buffer<float> y(m * d);
    for (float& value : y.span()) value = kNan;
    Context ctx(threads);
    FfnPlan plan;
    plan.policy = policy;
    ffn_forward(ctx, weights(), x.matrix(m, d), y.matrix(m, d), plan, row_nnz);
    if (plan_out != nullptr) *plan_out = plan;
    return y;
  }

  int64_t m, d, f;
  bool gated;
  Activation activation = Activation::kRelu;
  float threshold = 0.0f;  // of FATReLU
  Buffer<float> x, gate, up, down;

  double activate(double z) const {
    if (activation == Activation::kSilu) return z / (1.0 + std::exp(-z));
    if (activation == Activation::kFatRelu) return z > static_cast<double>(threshold) ? z : 0.0;
    return activation == Activation::kRelu2 ? std::max(z, 0.0) * std::max(z, 0.0)
                                            : std::max(z, 0.0);
  }
};

struct Reference {
  std::vector<double> y;          // [M, D]
  std::vector<double> tolerance;  // [M, D]
  std::vector<int64_t> row_nnz;   // [M], neurons whose sign no rounding can change
  std::vector<int64_t> unsure;    // [M], the others
};

double dot(const float* a, const float* b, int64_t n, double& norm) {
  double sum = 0.0;
  norm = 0.0;
  for (int64_t k = 0; k < n; ++k) {
    const double term = static_cast<double>(a[k]) * b[k];
    sum += term;
    norm += std::abs(term);
  }
  return sum;
}

// In double. An f32 sum of n products in any order is off by about eps * sqrt(n) * sum |terms|;
// every stage adds such a term for its own sum and passes on those of its operands.
Reference reference(const Layer& layer) {
  const double eps = std::numeric_limits<float>::epsilon();
  const double eps_d = eps * std::sqrt(static_cast<double>(layer.d));
  const double eps_f = eps * std::sqrt(static_cast<double>(layer.f));
  const auto size = static_cast<size_t>(layer.m * layer.d);
  Reference out{std::vector<double>(size), std::vector<double>(size),
                std::vector<int64_t>(static_cast<size_t>(layer.m)),
                std::vector<int64_t>(static_cast<size_t>(layer.m))};
  const Buffer<float>& firing = layer.gated ? layer.gate : layer.up;
  for (int64_t row = 0; row < layer.m; ++row) {
    const float* x = layer.x.data() + row * layer.d;
    for (int64_t n = 0; n < layer.f; ++n) {
      double g_norm = 0.0;
      const double g = dot(x, firing.data() + n * layer.d, layer.d, g_norm);
      const double g_error = eps_d * g_norm;
      const double cut = static_cast<double>(layer.threshold);
      const bool unsure = std::abs(g - cut) <= g_error;
      if (g - cut > g_error) ++out.row_nnz[static_cast<size_t>(row)];
      if (unsure) ++out.unsure[static_cast<size_t>(row)];
      double u = 1.0;
      double u_norm = 0.0;
      if (layer.gated) u = dot(x, layer.up.data() + n * layer.d, layer.d, u_norm);
      if (layer.activation == Activation::kDRelu) u = std::max(u, 0.0);
      const double fired = layer.activate(g);
      const double h = fired * u;
      // The slope of SiLU is 1.1 at most; its own rounding is a few eps.
      const double slope = layer.activation == Activation::kSilu    ? 1.1
                           : layer.activation == Activation::kRelu2 ? 2.0 * (std::abs(g) + g_error)
                                                                    : 1.0;
      double h_error = g - cut > -g_error || layer.activation == Activation::kSilu
                           ? slope * g_error * std::abs(u) +
                                 std::abs(fired) * (eps_d * u_norm + 4.0 * eps * std::abs(u))
                           : 0.0;
      if (unsure) h_error += cut * std::abs(u);  // FATReLU's jump
      for (int64_t k = 0; k < layer.d; ++k) {
        const auto at = static_cast<size_t>(row * layer.d + k);
        const double w = layer.down[n * layer.d + k];
        out.y[at] += h * w;
        out.tolerance[at] += (h_error + eps_f * std::abs(h)) * std::abs(w);
      }
    }
  }
  return out;
}

bool same_bits(const Buffer<float>& a, const Buffer<float>& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size()) * sizeof(float)) == 0;
}

TEST(Ffn, OtherActivationsRunDenseWhateverThePolicy) {
  for (const bool gated : {true, false}) {
    Layer layer(129, 72, 600, gated, 0.5f);
    layer.activation = Activation::kSilu;
    const Reference expected = reference(layer);
    for (const FfnPolicy policy : kPolicies) {
      FfnPlan plan;
      std::vector<int32_t> row_nnz(129, -1);
      const Buffer<float> y = layer.run(policy, 2, &plan, row_nnz);
      for (size_t i = 0; i < expected.y.size(); ++i) {
        ASSERT_NEAR(y[static_cast<int64_t>(i)], expected.y[i], expected.tolerance[i]) << i;
      }
      EXPECT_EQ(plan.execution, FfnExecution::kDense);
      EXPECT_EQ(plan.reason, "silu leaves no zeros to skip");
      EXPECT_EQ(row_nnz, std::vector<int32_t>(129, 600));
    }
  }
}

// bias 2: a few percent of the neurons fire; 0: half of them; -9: all.
class FfnExecutions : public testing::TestWithParam<Activation> {};

TEST_P(FfnExecutions, AllGiveTheDenseResult) {
  for (const bool gated : {true, false}) {
    if (!gated && GetParam() == Activation::kDRelu) continue;
    for (const float bias : {2.0f, 0.0f, -9.0f}) {
      for (const int64_t m : {1, 127, 129}) {
        Layer layer(m, 72, 600, gated, bias, m > 1 ? 5 : -1);
        layer.activation = GetParam();
        if (GetParam() == Activation::kFatRelu) layer.threshold = 0.3f;
        const Reference expected = reference(layer);
        for (const FfnPolicy policy : kPolicies) {
          SCOPED_TRACE(testing::Message() << "gated " << gated << " bias " << bias << " M " << m
                                          << " policy " << ffn_policy_name(policy));
          std::vector<int32_t> row_nnz(static_cast<size_t>(m), -1);
          const Buffer<float> y = layer.run(policy, 2, nullptr, row_nnz);
          for (size_t i = 0; i < expected.y.size(); ++i) {
            ASSERT_NEAR(y[static_cast<int64_t>(i)], expected.y[i], expected.tolerance[i]) << i;
          }
          for (size_t row = 0; row < row_nnz.size(); ++row) {
            EXPECT_GE(row_nnz[row], expected.row_nnz[row]);
            EXPECT_LE(row_nnz[row], expected.row_nnz[row] + expected.unsure[row]);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, FfnExecutions,
                         testing::Values(Activation::kRelu, Activation::kRelu2,
                                         Activation::kFatRelu, Activation::kDRelu),
                         [](const auto& suite_info) {
                           return std::string(activation_name(suite_info.param));
                         });

TEST(Ffn, RepeatsBitForBitWhateverCameBefore) {
  const Layer sparse(70, 64, 520, true, 2.0f);
  const Layer dense(70, 64, 520, true, -9.0f);
  for (const FfnPolicy policy : kPolicies) {
    const Buffer<float> fresh = sparse.run(policy, 2);
    Context ctx(2);
    FfnPlan plan;
    plan.policy = policy;
    Buffer<float> y(70 * 64);
    for (const Layer* layer : {&sparse, &dense, &sparse}) {
      ffn_forward(ctx, layer->weights(), layer->x.matrix(70, 64), y.matrix(70, 64), plan);
    }
    EXPECT_TRUE(same_bits(fresh, y));
  }
}

TEST(Ffn, ThreadCountsAgree) {
  const Layer layer(129, 72, 600, true, 1.0f, 7);
  const Reference expected = reference(layer);
  for (const FfnPolicy policy : kPolicies) {
    for (const int threads : {1, 3, 5}) {
      const Buffer<float> y = layer.run(policy, threads);
      for (size_t i = 0; i < expected.y.size(); ++i) {
        ASSERT_NEAR(y[static_cast<int64_t>(i)], expected.y[i], expected.tolerance[i]) << i;
      }
    }
  }
}

TEST(Ffn, ChunksOfManyTokensJoinUp) {
  const Layer layer(2 * kFfnChunkTokens + 1, 16, 40, true, 1.0f);
  const Reference expected = reference(layer);
  for (const FfnPolicy policy : kPolicies) {
    FfnPlan plan;
    const Buffer<float> y = layer.run(policy, 2, &plan);
    EXPECT_EQ(plan.tokens, layer.m);
    for (size_t i = 0; i < expected.y.size(); ++i) {
      ASSERT_NEAR(y[static_cast<int64_t>(i)], expected.y[i], expected.tolerance[i]) << i;
    }
  }
}

// NaN in a token reaches that token's whole result, and no other token, in every execution.
TEST_P(FfnExecutions, NanReachesItsTokenOnly) {
  for (const bool gated : {true, false}) {
    for (const int64_t ffn : {7, 200, 700}) {
      Layer layer(6, 32, ffn, gated, 1.0f);
      layer.activation = GetParam();
      const Buffer<float> finite = layer.run(FfnPolicy::kDense, 2);
      layer.x[2 * layer.d + 5] = kNan;
      for (const FfnPolicy policy : kPolicies) {
        FfnPlan plan;
        const Buffer<float> y = layer.run(policy, 2, &plan);
        EXPECT_EQ(plan.max_row_nnz, ffn);
        for (int64_t i = 0; i < y.size(); ++i) {
          if (i / layer.d == 2) {
            ASSERT_TRUE(std::isnan(y[i])) << i;
          } else {
            ASSERT_NEAR(y[i], finite[i], 1e-3) << i;
          }
        }
      }
    }
  }
}

TEST(FfnPlan, AutoFollowsWhatItMeasures) {
  FfnPlan plan;
  Layer(64, 64, 512, true, 2.5f).run(FfnPolicy::kAuto, 2, &plan);
  EXPECT_NE(plan.execution, FfnExecution::kDense) << plan.reason;
  EXPECT_EQ(plan.tokens, 64);
  EXPECT_GT(plan.nnz, 0);
  EXPECT_GE(plan.max_row_nnz * 64, plan.nnz);
  Layer(64, 64, 512, true, -9.0f).run(FfnPolicy::kAuto, 2, &plan);
  EXPECT_EQ(plan.execution, FfnExecution::kDense) << plan.reason;
  EXPECT_EQ(plan.nnz, 64 * 512);
  Layer(1, 64, 512, true, 2.5f).run(FfnPolicy::kAuto, 2, &plan);
  EXPECT_EQ(plan.execution, FfnExecution::kRowFused) << plan.reason;
  EXPECT_FALSE(plan.reason.empty());
}

// The CPU has no 8-bit gates.
TEST(FfnPlan, ScreenedPoliciesAreAutoOnTheCpu) {
  for (const float bias : {2.5f, -9.0f}) {
    const Layer layer(64, 64, 512, true, bias);
    FfnPlan want;
    const Buffer<float> y = layer.run(FfnPolicy::kAuto, 2, &want);
    for (const FfnPolicy policy : {FfnPolicy::kScreened, FfnPolicy::kScreenedStrict}) {
      FfnPlan plan;
      EXPECT_TRUE(same_bits(layer.run(policy, 2, &plan), y));
      EXPECT_EQ(plan.execution, want.execution);
      EXPECT_EQ(plan.reason, want.reason);
    }
  }
}

TEST(FfnPolicy, Names) {
  for (const auto& [name, policy] : {std::pair{"auto", FfnPolicy::kAuto},
                                     {"dense", FfnPolicy::kDense},
                                     {"row-fused", FfnPolicy::kRowFused},
                                     {"tile-union", FfnPolicy::kTileUnion},
                                     {"screened", FfnPolicy::kScreened},
                                     {"screened-strict", FfnPolicy::kScreenedStrict},
                                     {"sparse", FfnPolicy::kSparse},
                                     {"decode-rows", {FfnPolicy::Kind::kNamed, "decode-rows"}}}) {
    EXPECT_EQ(parse_ffn_policy(name), policy);
    EXPECT_EQ(ffn_policy_name(policy), name);
  }
  EXPECT_EQ(FfnExecution::kTileUnion.name, "tile-union");
  EXPECT_THROW(parse_ffn_policy("quick"), InputError);
}

TEST(Ffn, RefusesShapesThatDisagree) {
  const Layer layer(4, 16, 24, true, 0.0f);
  Context ctx(1);
  FfnPlan plan;
  Buffer<float> y(4 * 16);
  EXPECT_THROW(ffn_forward(ctx, layer.weights(), layer.x.matrix(4, 16), y.matrix(3, 16), plan),
               Error);
  FfnWeights weights = layer.weights();
  weights.w_down = layer.down.matrix(12, 16);
  EXPECT_THROW(ffn_forward(ctx, weights, layer.x.matrix(4, 16), y.matrix(4, 16), plan), Error);
}

// Weights in the dtypes of a file, one of each, against the same values in f32: every execution
// adds in the same order, so the bits agree.
TEST(Ffn, StoredWeightsGiveTheResultOfTheirValues) {
  for (const int64_t tokens : {1, 5, 16, 40}) {
    for (const bool gated : {true, false}) {
      Layer layer(tokens, 48, 208, gated, 1.5f);
      const auto round = [](Buffer<float>& values, DType dtype) {
        std::vector<uint16_t> stored;
        for (float& value : values.span()) {
          stored.push_back(dtype == DType::kBF16 ? to_bf16(value).bits : float_to_f16(value));
          value =
              dtype == DType::kBF16 ? to_float(BF16{stored.back()}) : f16_to_float(stored.back());
        }
        return stored;
      };
      const std::vector<uint16_t> gate = round(layer.gate, DType::kBF16),
                                  up = round(layer.up, DType::kF16),
                                  down = round(layer.down, DType::kBF16);
      StoredFfnWeights weights = layer.weights();
      if (gated) weights.w_gate = {gate.data(), DType::kBF16, layer.f, layer.d};
      weights.w_up = {up.data(), DType::kF16, layer.f, layer.d};
      weights.w_down = {down.data(), DType::kBF16, layer.f, layer.d};
      for (const FfnPolicy policy : kPolicies) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens " << ffn_policy_name(policy));
        const Buffer<float> want = layer.run(policy, 2);
        Buffer<float> got(tokens * layer.d);
        Context ctx(2);
        FfnPlan plan;
        plan.policy = policy;
        ffn_forward(ctx, weights, layer.x.matrix(tokens, layer.d), got.matrix(tokens, layer.d),
                    plan);
        EXPECT_EQ(std::memcmp(got.data(), want.data(), got.span().size_bytes()), 0);
      }
    }
  }
}

}  // namespace
}  // namespace twell
