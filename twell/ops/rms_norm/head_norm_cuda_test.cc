// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

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

TEST(HeadNormCuda, RefusesHeadsItDoesNotHold) {
  EXPECT_EQ(launch_head_norm({.tokens = 1, .heads = 1, .kv_heads = 1, .head_dim = 12}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_head_norm({.tokens = 1, .heads = 1, .kv_heads = 1, .head_dim = 264}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace twell
