// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/activation/activation_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

constexpr Activation kSmooth[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                  Activation::kQuickGelu};
constexpr double kEps = 0x1p-23;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double reference(Activation activation, double x) {
  const auto sigmoid = [](double z) { return 1.0 / (1.0 + std::exp(-z)); };
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
    case Activation::kGeluTanh:
      return 0.5 * x *
             (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    default:
      return x * sigmoid(1.702 * x);
  }
}

double blended(const BlendedActivation& f, double x) {
  const double share = static_cast<double>(f.relu_share);
  return share * std::max(x, 0.0) + (1.0 - share) * reference(f.kind, x);
}

// Values from far below to far above zero, with both ends and the neighbourhood of zero.
std::vector<float> arguments(int64_t n) {
  std::vector<float> x = {0.0f, -0.0f, 1e-30f, -1e-30f, 88.0f, -88.0f, 1e4f, -1e4f, 1e30f, -1e30f};
  for (uint64_t i = x.size(); i < static_cast<uint64_t>(n); ++i) {
    x.push_back(3.0f * normal(1, 0, i));
  }
  x.resize(static_cast<size_t>(n));
  return x;
}

class ActivationRows : public ::testing::TestWithParam<Activation> {};

TEST_P(ActivationRows, ForwardMatchesTheDefinition) {
  for (const float share : {0.0f, 0.3f, 1.0f}) {
    for (const int64_t n : {1, 7, 16, 129, 4096}) {
      const BlendedActivation f{GetParam(), share};
      const std::vector<float> x = arguments(n);
      std::vector<float> u, h(x.size(), kNan), fired(x.size(), 0.0f);
      for (size_t i = 0; i < x.size(); ++i) u.push_back(normal(2, 0, i));
      double l1 = 0.0;
      int64_t nnz = 0;
      const ActivatedRow row = activate_row(f, x.data(), u.data(), h.data(), fired.data(), n);
      for (size_t i = 0; i < x.size(); ++i) {
        const double v = static_cast<double>(x[i]);
        const double expected = blended(f, v) * static_cast<double>(u[i]);
        // A few ulp of x times the step, which is at most 1. Where the value is far smaller than x,
        // the step is a tail, whose exponent has the relative error |x|^2 eps.
        const double bound = kEps * std::abs(static_cast<double>(u[i])) *
                             (8.0 * std::abs(blended(f, v)) + 2.0 * std::min(std::abs(v), 1.0));
        EXPECT_NEAR(h[i], expected, bound + 1e-38) << v;
        l1 += std::abs(static_cast<double>(h[i]));
        const bool on = share > 0.0f ? x[i] > 0.0f : h[i] != 0.0f;
        nnz += on;
        EXPECT_EQ(fired[i], on ? 1.0f : 0.0f) << v;
      }
      EXPECT_EQ(row.nnz, nnz);
      EXPECT_NEAR(row.l1, l1, 64 * kEps * l1);
    }
  }
}

TEST_P(ActivationRows, BackwardIsTheDerivative) {
  constexpr int64_t kN = 133;
  for (const float share : {0.0f, 0.6f}) {
    for (const bool gated : {true, false}) {
      const BlendedActivation f{GetParam(), share};
      constexpr float kL1 = 0.25f;
      std::vector<float> x, u, d_out, h(kN, kNan), d_u(kN, kNan);
      for (uint64_t i = 0; i < kN; ++i) {
        x.push_back(2.0f * normal(3, 0, i));
        u.push_back(gated ? normal(4, 0, i) : 1.0f);
        d_out.push_back(normal(5, 0, i));
      }
      std::vector<float> d_x = d_out;
      activate_backward_row(f,
                            {.x = x.data(),
                             .u = gated ? u.data() : nullptr,
                             .l1 = kL1,
                             .d_h = d_x.data(),
                             .d_u = gated ? d_u.data() : nullptr,
                             .h = h.data()},
                            kN);
      for (size_t i = 0; i < kN; ++i) {
        const double v = static_cast<double>(x[i]), up = static_cast<double>(u[i]);
        const double value = blended(f, v), step = 1e-5;
        const double slope = (blended(f, v + step) - blended(f, v - step)) / (2.0 * step);
        const double sign = value * up > 0.0 ? 1.0 : -1.0;
        const double d = static_cast<double>(d_out[i]) + static_cast<double>(kL1) * sign;
        const double near = 16.0 * kEps * (1.0 + std::abs(v)) * std::abs(d) * (1.0 + std::abs(up));
        EXPECT_NEAR(h[i], value * up, 8.0 * kEps * std::abs(up) * (std::abs(value) + 1.0));
        EXPECT_NEAR(d_x[i], d * up * slope, near + 1e-8);
        if (gated) {
          EXPECT_NEAR(d_u[i], d * value, near);
        }
      }
    }
  }
}

TEST_P(ActivationRows, WorksInPlaceAndKeepsNotANumber) {
  std::vector<float> x = {kNan, 1.0f, -1.0f};
  activate_row({GetParam()}, x.data(), nullptr, x.data(), nullptr, 3);
  EXPECT_TRUE(std::isnan(x[0]));
  EXPECT_NEAR(x[1], reference(GetParam(), 1.0), 4 * kEps);
  EXPECT_NEAR(x[2], reference(GetParam(), -1.0), 4 * kEps);
}

class ReluRows : public ::testing::TestWithParam<Activation> {};

// FATReLU with a threshold of 1/4, others without.
BlendedActivation with_zeros(Activation kind) {
  return {.kind = kind, .threshold = kind == Activation::kFatRelu ? 0.25f : 0.0f};
}

// h = f(x) u with f(x) = max(x, 0), its square, or x above the threshold, and f' = 1 or 2 max(x, 0)
// there, each with one rounding per product. Under dReLU u is max(u, 0).
TEST_P(ReluRows, ForwardAndBackward) {
  const bool squared = GetParam() == Activation::kRelu2;
  const bool both = GetParam() == Activation::kDRelu;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const int64_t n : {1, 7, 133}) {
    for (const bool gated : {true, false}) {
      std::vector<float> x = {-kInf, 1e-30f, -0.0f, 3.0f, -3.0f, 0.0f, 0.5f, 0.25f}, u, d_out;
      for (uint64_t i = x.size(); i < static_cast<uint64_t>(n); ++i) {
        x.push_back(2.0f * normal(6, 0, i));
      }
      x.resize(static_cast<size_t>(n));
      for (uint64_t i = 0; i < x.size(); ++i) {
        u.push_back(gated ? normal(7, 0, i) : 1.0f);
        d_out.push_back(normal(8, 0, i));
      }
      const BlendedActivation f = with_zeros(GetParam());
      std::vector<float> h(x.size(), kNan), again(x.size(), kNan), d_u(x.size(), kNan), d_x = d_out;
      std::vector<float> fired(x.size(), 0.0f);
      const ActivatedRow row =
          activate_row(f, x.data(), gated ? u.data() : nullptr, h.data(), fired.data(), n);
      activate_backward_row(f,
                            {.x = x.data(),
                             .u = gated ? u.data() : nullptr,
                             .l1 = 0.25f,
                             .d_h = d_x.data(),
                             .d_u = gated ? d_u.data() : nullptr,
                             .h = again.data()},
                            n);
      int64_t nnz = 0;
      double l1 = 0.0;
      for (size_t i = 0; i < x.size(); ++i) {
        const bool on = x[i] > f.zero_up_to();
        const double g = on ? static_cast<double>(x[i]) : 0.0;
        const double up =
            both ? std::max(static_cast<double>(u[i]), 0.0) : static_cast<double>(u[i]);
        const double value = squared ? g * g : g, slope = squared ? 2.0 * g : on;
        const double want = value * up;
        EXPECT_NEAR(h[i], want, 2.0 * kEps * std::abs(want) + 1e-38) << x[i];
        EXPECT_EQ(h[i], again[i]);
        nnz += on;
        l1 += std::abs(static_cast<double>(h[i]));
        EXPECT_EQ(fired[i], on ? 1.0f : 0.0f) << x[i];
        const double sign = h[i] > 0.0f ? 1.0 : (h[i] < 0.0f ? -1.0 : 0.0);
        const double d = static_cast<double>(d_out[i]) + 0.25 * sign;
        const double bound =
            8.0 * kEps * (std::abs(d) + 0.25) * (1.0 + std::abs(up)) * (1.0 + g * g);
        EXPECT_NEAR(d_x[i], d * up * slope, bound) << x[i];
        if (gated) {
          EXPECT_NEAR(d_u[i], both && up == 0.0 ? 0.0 : d * value, bound) << x[i];
        }
      }
      EXPECT_EQ(row.nnz, nnz);
      EXPECT_NEAR(row.l1, l1, 64 * kEps * l1);
    }
  }
  float nan = kNan;
  activate_row(with_zeros(GetParam()), &nan, nullptr, &nan, nullptr, 1);
  EXPECT_TRUE(std::isnan(nan));
}

// Executions that skip inactive neurons never see their u, however large it is.
TEST_P(ReluRows, InactiveNeuronsGiveZeros) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> x(37, -1.0f), u(37, kInf);
  std::vector<float> h(37, kNan), d_x(37, kInf);
  activate_row(with_zeros(GetParam()), x.data(), u.data(), h.data(), nullptr, 37);
  activate_backward_row(with_zeros(GetParam()), {.x = x.data(), .u = u.data(), .d_h = d_x.data()},
                        37);
  EXPECT_EQ(h, std::vector<float>(37, 0.0f));
  EXPECT_EQ(d_x, std::vector<float>(37, 0.0f));
}

TEST(ActivationRowsContract, BlendsAreChecked) {
  float x = 1.0f;
  EXPECT_THROW(activate_row({Activation::kSilu, 1.5f}, &x, nullptr, &x, nullptr, 1), Error);
  EXPECT_THROW(activate_row({Activation::kRelu2, 0.5f}, &x, nullptr, &x, nullptr, 1), Error);
  EXPECT_THROW(activate_row({Activation::kFatRelu, 0.5f}, &x, nullptr, &x, nullptr, 1), Error);
  EXPECT_THROW(activate_row({Activation::kFatRelu, 0.0f, -1.0f}, &x, nullptr, &x, nullptr, 1),
               Error);
}

INSTANTIATE_TEST_SUITE_P(WithZeros, ReluRows,
                         ::testing::Values(Activation::kRelu, Activation::kRelu2,
                                           Activation::kFatRelu, Activation::kDRelu),
                         [](const auto& suite_info) {
                           return std::string(activation_name(suite_info.param));
                         });

INSTANTIATE_TEST_SUITE_P(Smooth, ActivationRows, ::testing::ValuesIn(kSmooth),
                         [](const auto& suite_info) {
                           return std::string(activation_name(suite_info.param));
                         });

}  // namespace
}  // namespace twell
