// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/rms_norm/rms_norm.h"

namespace twell {
namespace {

struct Case {
  int64_t tokens, heads, kv_heads, head_dim;
  bool bias;
};

class HeadNormCudaTest : public testing::TestWithParam<Case> {};

TEST_P(HeadNormCudaTest, EqualsReference) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, heads, kv_heads, head_dim, with_bias] = GetParam();
  const CudaStream stream;
  const int64_t width = (heads + 2 * kv_heads) * head_dim;
  const auto qkv = random_bf16(tokens * width, 1, 2.0f), bias = random_bf16(width, 2),
             q_norm = random_bf16(head_dim, 3), k_norm = random_bf16(head_dim, 4);
  const auto device_qkv = upload(qkv), device_bias = upload(bias), device_q = upload(q_norm),
             device_k = upload(k_norm);
  TWELL_CUDA_CHECK(launch_head_norm({.tokens = tokens,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = head_dim,
                                     .bias = with_bias ? device_bias.data() : nullptr,
                                     .q_norm = device_q.data(),
                                     .k_norm = device_k.data(),
                                     .qkv = device_qkv.data(),
                                     .eps = 1e-5f},
                                    stream.get()));
  stream.synchronize();
  const std::vector<float> got = to_floats(download(device_qkv));
  std::vector<float> want = to_floats(qkv);
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t head = 0; head < heads + 2 * kv_heads; ++head) {
      float* x = want.data() + m * width + head * head_dim;
      double squares = 0.0;
      for (int64_t i = 0; i < head_dim; ++i) {
        // The sum is rounded, as it is without a norm.
        const auto at = static_cast<size_t>(head * head_dim + i);
        if (with_bias) x[i] = __bfloat162float(__float2bfloat16(x[i] + __bfloat162float(bias[at])));
        squares += static_cast<double>(x[i]) * x[i];
      }
      if (head >= heads + kv_heads) continue;
      const auto& weight = head < heads ? q_norm : k_norm;
      const double inv = 1.0 / std::sqrt(squares / static_cast<double>(head_dim) + 1e-5);
      for (int64_t i = 0; i < head_dim; ++i) {
        const double scale = __bfloat162float(weight[static_cast<size_t>(i)]);
        x[i] = static_cast<float>(x[i] * inv * scale);
      }
    }
  }
  for (size_t i = 0; i < want.size(); ++i) {
    // One rounding to bf16, which a few f32 roundings may tip to the other side.
    ASSERT_NEAR(got[i], want[i], 1.01 * std::ldexp(std::abs(want[i]), -8)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, HeadNormCudaTest,
                         testing::Values(Case{1, 1, 1, 8, false}, Case{129, 4, 2, 128, false},
                                         Case{127, 32, 8, 64, true}, Case{3, 2, 2, 256, true},
                                         Case{33, 5, 1, 24, false}));

// The gradient in place, against the CPU's on what the forward pass kept.
TEST_P(HeadNormCudaTest, BackwardEqualsTheCpus) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, heads, kv_heads, head_dim, with_bias] = GetParam();
  const CudaStream stream;
  const int64_t width = (heads + 2 * kv_heads) * head_dim, normed = (heads + kv_heads) * head_dim;
  constexpr float kEps = 1e-5f, kStart = 0.5f;
  const auto qkv = random_bf16(tokens * width, 1, 2.0f), bias = random_bf16(width, 2),
             q_norm = random_bf16(head_dim, 3), k_norm = random_bf16(head_dim, 4),
             d_qkv = random_bf16(tokens * width, 5);
  const auto device_qkv = upload(qkv), device_bias = upload(bias), device_q = upload(q_norm),
             device_k = upload(k_norm), device_d = upload(d_qkv);
  const auto kept = poisoned<__nv_bfloat16>(tokens * normed);
  const std::vector<float> start(static_cast<size_t>(head_dim), kStart);
  const auto d_q_norm = upload(start), d_k_norm = upload(start);
  const auto partial = poisoned<float>(2 * head_norm_backward_partials(tokens) * head_dim);
  TWELL_CUDA_CHECK(launch_head_norm({.tokens = tokens,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = head_dim,
                                     .bias = with_bias ? device_bias.data() : nullptr,
                                     .q_norm = device_q.data(),
                                     .k_norm = device_k.data(),
                                     .qkv = device_qkv.data(),
                                     .eps = kEps,
                                     .kept = kept.data()},
                                    stream.get()));
  TWELL_CUDA_CHECK(launch_head_norm_backward({.tokens = tokens,
                                              .heads = heads,
                                              .kv_heads = kv_heads,
                                              .head_dim = head_dim,
                                              .kept = kept.data(),
                                              .q_norm = device_q.data(),
                                              .k_norm = device_k.data(),
                                              .d_qkv = device_d.data(),
                                              .d_q_norm = d_q_norm.data(),
                                              .d_k_norm = d_k_norm.data(),
                                              .partial = partial.data(),
                                              .eps = kEps},
                                             stream.get()));
  stream.synchronize();
  const std::vector<float> x = to_floats(download(kept)), got = to_floats(download(device_d));
  std::vector<float> want = to_floats(d_qkv);
  Context ctx;
  for (const bool key : {false, true}) {
    const int64_t columns = (key ? kv_heads : heads) * head_dim, first = key ? heads * head_dim : 0;
    const std::vector<float> weight = to_floats(key ? k_norm : q_norm);
    std::vector<float> normalised = x, inv_rms(static_cast<size_t>(columns / head_dim * tokens)),
                       d_weight = start;
    head_norm_forward(ctx, MatrixF(normalised.data() + first, tokens, columns, normed), head_dim,
                      weight.data(), kEps, inv_rms.data());
    head_norm_backward(ctx, {.x = ConstMatrixF(x.data() + first, tokens, columns, normed),
                             .head_dim = head_dim,
                             .weight = weight.data(),
                             .inv_rms = inv_rms.data(),
                             .d = MatrixF(want.data() + first, tokens, columns, width),
                             .d_weight = d_weight.data()});
    const std::vector<float> got_weight = download(key ? d_k_norm : d_q_norm);
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < got_weight.size(); ++i) {
      error += std::pow(static_cast<double>(got_weight[i] - d_weight[i]), 2.0);
      size += std::pow(static_cast<double>(d_weight[i] - kStart), 2.0);
    }
    // f32 sums in another order.
    EXPECT_LE(std::sqrt(error / size), 1e-5) << (key ? "keys" : "queries");
  }
  for (size_t i = 0; i < want.size(); ++i) {
    // A difference of two terms of the size of d times weight, rounded to bf16 once.
    ASSERT_NEAR(got[i], want[i], 1.01 * std::ldexp(std::abs(want[i]), -8) + 1e-5) << i;
  }
  const auto again = upload(d_qkv);
  const auto d_q_again = upload(start), d_k_again = upload(start);
  TWELL_CUDA_CHECK(launch_head_norm_backward({.tokens = tokens,
                                              .heads = heads,
                                              .kv_heads = kv_heads,
                                              .head_dim = head_dim,
                                              .kept = kept.data(),
                                              .q_norm = device_q.data(),
                                              .k_norm = device_k.data(),
                                              .d_qkv = again.data(),
                                              .d_q_norm = d_q_again.data(),
                                              .d_k_norm = d_k_again.data(),
                                              .partial = partial.data(),
                                              .eps = kEps},
                                             stream.get()));
  stream.synchronize();
  EXPECT_EQ(to_floats(download(again)), got);
  EXPECT_EQ(download(d_q_again), download(d_q_norm));
  EXPECT_EQ(download(d_k_again), download(d_k_norm));
}

TEST(HeadNormCuda, RefusesHeadsItDoesNotHold) {
  EXPECT_EQ(launch_head_norm({.tokens = 1, .heads = 1, .kv_heads = 1, .head_dim = 12}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_head_norm({.tokens = 1, .heads = 1, .kv_heads = 1, .head_dim = 264}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace twell
