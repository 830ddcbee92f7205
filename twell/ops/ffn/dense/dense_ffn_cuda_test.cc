// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

constexpr float kThreshold = 0.75f;  // of FATReLU; also a value of bf16, which becomes 0

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      // 0.5 (1 + tanh(z)), which cancels in the tail.
      return x / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kQuickGelu:
      return x / (1.0 + std::exp(-1.702 * x));
    case Activation::kRelu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
    case Activation::kFatRelu:
      return x > kThreshold ? x : 0.0;
    case Activation::kDRelu:
      return std::max(x, 0.0);
  }
  return NAN;
}

class ActivateMultiplyTest : public testing::TestWithParam<Activation> {};

TEST_P(ActivateMultiplyTest, EqualsReference) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  for (const int64_t tokens : {1, 127, 129, 1100}) {  // 1,100: up to three of a CTA
    constexpr int64_t kFfn = 2088;  // more than one piece per thread, and not a multiple
    auto g = random_bf16(tokens * kFfn, 1, 3.0f);
    const auto u = random_bf16(tokens * kFfn, 2);
    // Large values of both signs, for which exponentials overflow, and zeros, which do not count.
    const float large = GetParam() == Activation::kRelu2 ? 1e18f : 3e38f;  // its square is finite
    const float special[] = {0.0f, -0.0f, 60.0f, -60.0f, 200.0f, -200.0f, large, -large};
    for (size_t i = 0; i < 8; ++i) g[i] = __float2bfloat16(special[i]);
    const auto device_g = upload(g), device_u = upload(u);
    for (const bool gated : {true, false}) {
      const auto h = poisoned<__nv_bfloat16>(tokens * kFfn);
      const auto row_nnz = poisoned<int32_t>(tokens);
      const auto counts = upload(std::vector<ActivityCuda>(1));
      TWELL_CUDA_CHECK(launch_activate_multiply({.activation = GetParam(),
                                                 .g = device_g.data(),
                                                 .u = gated ? device_u.data() : nullptr,
                                                 .h = h.data(),
                                                 .tokens = tokens,
                                                 .ffn = kFfn,
                                                 .row_nnz = row_nnz.data(),
                                                 .counts = counts.data(),
                                                 .threshold = kThreshold},
                                                stream.get()));
      stream.synchronize();
      const auto got = to_floats(download(h));
      const auto nnz = download(row_nnz);
      unsigned long long total = 0, most = 0;
      for (int64_t m = 0; m < tokens; ++m) {
        // Where f is this small, exponentials may leave the range of f32 slightly earlier or later.
        int32_t at_least = 0, at_most = 0;
        for (int64_t i = m * kFfn; i < (m + 1) * kFfn; ++i) {
          const auto at = static_cast<size_t>(i);
          const double f = activate(GetParam(), __bfloat162float(g[at]));
          at_least += std::abs(f) > 1e-35 ? 1 : 0;
          at_most += f != 0.0 ? 1 : 0;
          double factor = __bfloat162float(u[at]);
          if (GetParam() == Activation::kDRelu) factor = std::max(factor, 0.0);
          const double want = gated ? f * factor : f;
          // One rounding to bf16; f32 in front of it cancels in the tails, where f is tiny.
          ASSERT_NEAR(got[at], want, std::ldexp(std::abs(want), -7) + 1e-6) << i;
        }
        EXPECT_GE(nnz[static_cast<size_t>(m)], at_least);
        EXPECT_LE(nnz[static_cast<size_t>(m)], at_most);
        total += static_cast<unsigned long long>(nnz[static_cast<size_t>(m)]);
        most = std::max(most, static_cast<unsigned long long>(nnz[static_cast<size_t>(m)]));
      }
      const ActivityCuda sums = download(counts)[0];
      EXPECT_EQ(sums.tokens, static_cast<unsigned long long>(tokens));
      EXPECT_EQ(sums.nnz, total);
      EXPECT_EQ(sums.max_row_nnz, most);
    }
  }
}

// NaN reaches h under every activation and counts as active.
TEST_P(ActivateMultiplyTest, KeepsNan) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  std::vector<__nv_bfloat16> g(8, __float2bfloat16(-1.0f)), u(8, __float2bfloat16(1.0f));
  g[3] = __float2bfloat16(NAN);
  const auto device_g = upload(g), device_u = upload(u);
  for (const bool gated : {true, false}) {
    const auto h = poisoned<__nv_bfloat16>(8);
    const auto row_nnz = poisoned<int32_t>(1);
    TWELL_CUDA_CHECK(launch_activate_multiply({.activation = GetParam(),
                                               .g = device_g.data(),
                                               .u = gated ? device_u.data() : nullptr,
                                               .h = h.data(),
                                               .tokens = 1,
                                               .ffn = 8,
                                               .row_nnz = row_nnz.data()},
                                              stream.get()));
    stream.synchronize();
    EXPECT_TRUE(std::isnan(to_floats(download(h))[3]));
    EXPECT_GE(download(row_nnz)[0], 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, ActivateMultiplyTest,
                         testing::Values(Activation::kRelu, Activation::kSilu, Activation::kGelu,
                                         Activation::kGeluTanh, Activation::kQuickGelu,
                                         Activation::kRelu2, Activation::kFatRelu,
                                         Activation::kDRelu));

}  // namespace
}  // namespace twell
