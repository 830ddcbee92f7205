// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rope/rope_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/ops/rope/rope_cuda_testing.h"

namespace twell {
namespace {

struct RopeCase {
  int64_t tokens, heads, kv_heads, head_dim;
};

class RopeCudaTest : public testing::TestWithParam<RopeCase> {};

TEST_P(RopeCudaTest, EqualsCpuWithAndWithoutCache) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, heads, kv_heads, head_dim] = GetParam();
  const CudaStream stream;
  Context ctx(1);
  const RopeOperands o(tokens, heads, kv_heads, head_dim);
  const auto qkv = random_bf16(tokens * o.columns, 1);
  std::vector<float> want = to_floats(qkv);
  rope(ctx, o.table, o.positions, MatrixF(want.data(), tokens, o.rotated, o.columns));

  const auto in_place = upload(qkv), with_cache = upload(qkv);
  TWELL_CUDA_CHECK(launch_rope(o.in_place(in_place.data()), stream.get()));
  TWELL_CUDA_CHECK(launch_rope(o.into_cache(with_cache.data()), stream.get()));
  stream.synchronize();
  const auto got = to_floats(download(in_place));
  const auto cached = o.gathered(to_floats(download(with_cache)));
  for (size_t i = 0; i < want.size(); ++i) {
    // Half a bf16 unit; f32 arithmetic adds little unless the terms cancel.
    ASSERT_NEAR(got[i], want[i], std::abs(want[i]) * std::ldexp(1.0f, -8) + 1e-6f) << i;
    ASSERT_EQ(cached[i], got[i]) << i;
  }
}

TEST_P(RopeCudaTest, InverseEqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, heads, kv_heads, head_dim] = GetParam();
  const CudaStream stream;
  Context ctx(1);
  const RopeOperands o(tokens, heads, kv_heads, head_dim);
  const auto d_qkv = random_bf16(tokens * o.columns, 2);
  const auto on_device = [&] {
    const auto values = upload(d_qkv);
    RopeCuda problem = o.in_place(values.data());
    problem.inverse = true;
    TWELL_CUDA_CHECK(launch_rope(problem, stream.get()));
    stream.synchronize();
    return to_floats(download(values));
  };
  std::vector<float> want = to_floats(d_qkv);
  rope(ctx, o.table, o.positions, MatrixF(want.data(), tokens, o.rotated, o.columns),
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
