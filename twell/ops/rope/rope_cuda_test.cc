// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rope/rope_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_testing.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/rope/rope.h"

namespace twell {
namespace {

struct RopeCase {
  int64_t tokens, heads, kv_heads, head_dim;
};

class RopeCudaTest : public testing::TestWithParam<RopeCase> {};

TEST_P(RopeCudaTest, EqualsCpuWithAndWithoutCache) {
  if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << why;
  const auto [tokens, heads, kv_heads, head_dim] = GetParam();
  const TestStream stream;
  Context ctx(1);
  const int64_t width = (heads + 2 * kv_heads) * head_dim, kv = kv_heads * head_dim;
  const int64_t rotated = (heads + kv_heads) * head_dim;
  const RopeTable table(300, head_dim, 10000.0);
  const auto cos = upload(std::vector<float>(table.cos.span().begin(), table.cos.span().end()));
  const auto sin = upload(std::vector<float>(table.sin.span().begin(), table.sin.span().end()));
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  std::vector<int64_t> cache_rows(static_cast<size_t>(tokens));
  for (size_t i = 0; i < positions.size(); ++i) {
    positions[i] = static_cast<int32_t>((i * 37 + 5) % 300);
    cache_rows[i] = tokens - 1 - static_cast<int64_t>(i);
  }
  const auto device_positions = upload(positions);
  const auto device_cache_rows = upload(cache_rows);
  const auto qkv = random_bf16(tokens * width, 1);
  std::vector<float> want = to_floats(qkv);
  rope(ctx, table, positions, MatrixF(want.data(), tokens, rotated, width));

  const auto in_place = upload(qkv), with_cache = upload(qkv);
  const auto keys = poisoned<__nv_bfloat16>(tokens * kv);
  const auto values = poisoned<__nv_bfloat16>(tokens * kv);
  RopeCuda problem{.tokens = tokens,
                   .heads = heads,
                   .kv_heads = kv_heads,
                   .head_dim = head_dim,
                   .cos = cos.data(),
                   .sin = sin.data(),
                   .positions = device_positions.data(),
                   .qkv = in_place.data()};
  TWELL_CUDA_CHECK(launch_rope(problem, stream.get()));
  problem.qkv = with_cache.data();
  problem.keys = keys.data();
  problem.values = values.data();
  problem.cache_rows = device_cache_rows.data();
  TWELL_CUDA_CHECK(launch_rope(problem, stream.get()));
  stream.synchronize();
  const auto got = to_floats(download(in_place)), got_q = to_floats(download(with_cache)),
             got_k = to_floats(download(keys)), got_v = to_floats(download(values));
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t c = 0; c < width; ++c) {
      const auto at = static_cast<size_t>(m * width + c);
      // Half a bf16 unit; the f32 arithmetic adds little to it unless the terms cancel.
      const float near = std::abs(want[at]) * std::ldexp(1.0f, -8) + 1e-6f;
      ASSERT_NEAR(got[at], want[at], near) << m << ", " << c;
      float cached = got_q[at];
      const auto row = static_cast<size_t>(cache_rows[static_cast<size_t>(m)] * kv);
      if (c >= heads * head_dim) {
        cached = c < rotated ? got_k[row + static_cast<size_t>(c - heads * head_dim)]
                             : got_v[row + static_cast<size_t>(c - rotated)];
      }
      ASSERT_EQ(cached, got[at]) << m << ", " << c;
    }
  }
}

TEST_P(RopeCudaTest, InverseEqualsCpu) {
  if (const std::string why = cuda_unavailable(); !why.empty()) GTEST_SKIP() << why;
  const auto [tokens, heads, kv_heads, head_dim] = GetParam();
  const TestStream stream;
  Context ctx(1);
  const int64_t width = (heads + 2 * kv_heads) * head_dim;
  const RopeTable table(tokens, head_dim, 10000.0);
  const auto cos = upload(std::vector<float>(table.cos.span().begin(), table.cos.span().end()));
  const auto sin = upload(std::vector<float>(table.sin.span().begin(), table.sin.span().end()));
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  for (size_t i = 0; i < positions.size(); ++i) {
    positions[i] = static_cast<int32_t>(i * 37 % positions.size());
  }
  const auto device_positions = upload(positions);
  const auto d_qkv = random_bf16(tokens * width, 2);
  const auto on_device = [&, h = heads, kv = kv_heads, hd = head_dim, m = tokens] {
    const auto values = upload(d_qkv);
    TWELL_CUDA_CHECK(launch_rope({.tokens = m,
                                  .heads = h,
                                  .kv_heads = kv,
                                  .head_dim = hd,
                                  .cos = cos.data(),
                                  .sin = sin.data(),
                                  .positions = device_positions.data(),
                                  .qkv = values.data(),
                                  .inverse = true},
                                 stream.get()));
    stream.synchronize();
    return to_floats(download(values));
  };
  std::vector<float> want = to_floats(d_qkv);
  rope(ctx, table, positions, MatrixF(want.data(), tokens, (heads + kv_heads) * head_dim, width),
       /*inverse=*/true);
  const auto got = on_device();
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], std::abs(want[i]) * std::ldexp(1.0f, -8) + 1e-6f) << i;
  }
  EXPECT_EQ(got, on_device());
}

INSTANTIATE_TEST_SUITE_P(Shapes, RopeCudaTest,
                         testing::Values(RopeCase{1, 1, 1, 2}, RopeCase{129, 4, 2, 8},
                                         RopeCase{65, 32, 8, 64}, RopeCase{7, 3, 3, 128}));

}  // namespace
}  // namespace twell
