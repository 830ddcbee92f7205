// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/qkv/qkv_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rng.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/rope/rope_cuda_testing.h"

namespace twell {
namespace {

struct QkvCase {
  int64_t tokens, width, heads, kv_heads, head_dim;
};

// -1, 0 or 1, so that sums of their products are small integers, exact in bf16 up to 256: certain
// with 256 products, and within seven standard deviations with the 2,688 used here.
std::vector<float> signs(int64_t n, uint64_t stream) {
  std::vector<float> out(static_cast<size_t>(n));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<float>(uniform_below(5, stream, i, 3)) - 1.0f;
  }
  return out;
}

std::vector<__nv_bfloat16> narrowed(const std::vector<float>& values) {
  std::vector<__nv_bfloat16> out;
  for (const float value : values) out.push_back(__float2bfloat16(value));
  return out;
}

class QkvCudaTest : public testing::TestWithParam<QkvCase> {};

TEST_P(QkvCudaTest, EqualsProductAndRotationWithAndWithoutCache) {
  TWELL_HOPPER_TEST();
  const auto [tokens, width, heads, kv_heads, head_dim] = GetParam();
  const RopeOperands o(tokens, heads, kv_heads, head_dim);
  const int64_t columns = o.columns;
  const auto x = signs(tokens * width, 1), w = signs(columns * width, 2);
  std::vector<float> want(static_cast<size_t>(tokens * columns));
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      float sum = 0.0f;
      for (int64_t d = 0; d < width; ++d) {
        sum += x[static_cast<size_t>(m * width + d)] * w[static_cast<size_t>(n * width + d)];
      }
      want[static_cast<size_t>(m * columns + n)] = sum;
    }
  }
  Context cpu(1);
  rope(cpu, o.table, o.positions, MatrixF(want.data(), tokens, o.rotated, columns));

  const auto device_x = upload(narrowed(x)), device_w = upload(narrowed(w));
  const auto alone = poisoned<__nv_bfloat16>(tokens * columns);
  const auto with_cache = poisoned<__nv_bfloat16>(tokens * columns);
  QkvCuda problem{
      .width = width, .x = device_x.data(), .w = device_w.data(), .rope = o.in_place(alone.data())};
  qkv_cuda(ctx, problem);
  problem.rope = o.into_cache(with_cache.data());
  qkv_cuda(ctx, problem);
  stream.synchronize();
  const auto got = to_floats(download(alone)), queries = to_floats(download(with_cache)),
             cached = o.gathered(queries);
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      const auto at = static_cast<size_t>(m * columns + n);
      // Half a bf16 unit, and f32 arithmetic on terms of up to 256.
      ASSERT_NEAR(got[at], want[at], std::ldexp(std::abs(want[at]), -8) + 1e-4f) << m << ", " << n;
      ASSERT_EQ(cached[at], got[at]) << m << ", " << n;
      ASSERT_TRUE(n < o.q_columns || std::isnan(queries[at]))
          << "written beside the cache: " << m << ", " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, QkvCudaTest,
                         testing::Values(QkvCase{1, 8, 1, 1, 64}, QkvCase{127, 64, 4, 2, 64},
                                         QkvCase{300, 136, 2, 1, 128}, QkvCase{257, 72, 5, 5, 64},
                                         QkvCase{1000, 256, 8, 8, 64},
                                         QkvCase{700, 200, 6, 3, 128}));

// More tiles than run at one time, so that a tile is rotated and stored during the next tile's
// products; with few and with many k-steps.
TEST(QkvCuda, EqualsProductAndRotationOverManyTiles) {
  TWELL_HOPPER_TEST();
  for (const auto& [tokens, width, heads, kv_heads, head_dim] :
       {QkvCase{9000, 2048, 16, 4, 64}, QkvCase{9000, 512, 16, 4, 64}, QkvCase{9000, 72, 16, 4, 64},
        QkvCase{9000, 2688, 8, 2, 128}, QkvCase{9000, 1032, 8, 2, 128}}) {
    const RopeOperands o(tokens, heads, kv_heads, head_dim);
    const auto x = upload(narrowed(signs(tokens * width, 1))),
               w = upload(narrowed(signs(o.columns * width, 2)));
    const auto want = poisoned<__nv_bfloat16>(tokens * o.columns);
    linear_cuda(ctx, {.rows = tokens,
                      .cols = o.columns,
                      .inner = width,
                      .x = x.data(),
                      .w = w.data(),
                      .y = want.data()});
    TWELL_CUDA_CHECK(launch_rope(o.in_place(want.data()), stream.get()));
    const auto got = poisoned<__nv_bfloat16>(tokens * o.columns);
    qkv_cuda(ctx, {.width = width, .x = x.data(), .w = w.data(), .rope = o.in_place(got.data())});
    stream.synchronize();
    const auto a = to_floats(download(want)), b = to_floats(download(got));
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(b[i], a[i]) << "width " << width << ", heads of " << head_dim << ", token "
                            << static_cast<int64_t>(i) / o.columns << " column "
                            << static_cast<int64_t>(i) % o.columns;
    }
  }
}

// In e4m3, which holds signs exactly, with scales of powers of two: the same sums, of up to 2,048
// in size, which the tensor cores add exactly.
TEST(QkvCuda, InBytesEqualsProductAndRotation) {
  TWELL_HOPPER_TEST();
  for (const auto& [tokens, width, heads, kv_heads, head_dim] :
       {QkvCase{9000, 2048, 16, 4, 64}, QkvCase{9000, 528, 16, 4, 64}, QkvCase{257, 80, 5, 5, 64},
        QkvCase{9000, 1040, 8, 2, 128}, QkvCase{700, 208, 6, 3, 128}}) {
    const RopeOperands o(tokens, heads, kv_heads, head_dim);
    const auto signs_x = signs(tokens * width, 1), signs_w = signs(o.columns * width, 2);
    const auto bytes_of = [](const std::vector<float>& values) {
      std::vector<uint8_t> bytes;
      for (const float value : values) bytes.push_back(to_e4m3(value));
      return bytes;
    };
    const auto x = upload(narrowed(signs_x)), w = upload(narrowed(signs_w));
    const auto x_bytes = upload(bytes_of(signs_x)), w_bytes = upload(bytes_of(signs_w));
    // Products with other scales are exact multiples.
    std::vector<float> of_x, of_w;
    for (int64_t m = 0; m < tokens; ++m)
      of_x.push_back(std::ldexp(4.0f, static_cast<int>(m % 3) - 1));
    for (int64_t n = 0; n < o.columns; ++n)
      of_w.push_back(std::ldexp(0.25f, static_cast<int>(n % 5) - 2));
    const auto x_scales = upload(of_x), w_scales = upload(of_w);
    const auto want = poisoned<__nv_bfloat16>(tokens * o.columns);
    linear_cuda(ctx, {.rows = tokens,
                      .cols = o.columns,
                      .inner = width,
                      .x = x.data(),
                      .w = w.data(),
                      .y = want.data()});
    auto scaled = download(want);
    for (size_t i = 0; i < scaled.size(); ++i) {
      const size_t columns = of_w.size();
      const float scale = of_x[i / columns] * of_w[i % columns];
      scaled[i] = __float2bfloat16(scale * __bfloat162float(scaled[i]));
    }
    const auto rotated = upload(scaled);
    TWELL_CUDA_CHECK(launch_rope(o.in_place(rotated.data()), stream.get()));
    const auto got = poisoned<__nv_bfloat16>(tokens * o.columns);
    qkv_cuda(ctx, {.width = width,
                   .rope = o.in_place(got.data()),
                   .x_bytes = {x_bytes.data(), x_scales.data()},
                   .w_bytes = {w_bytes.data(), w_scales.data()}});
    stream.synchronize();
    const auto a = to_floats(download(rotated)), b = to_floats(download(got));
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(b[i], a[i]) << "width " << width << ", heads of " << head_dim << ", token "
                            << static_cast<int64_t>(i) / o.columns << " column "
                            << static_cast<int64_t>(i) % o.columns;
    }
  }
}

TEST(QkvCuda, SaysWhatItTakes) {
  TWELL_GPU_TEST();
  const __nv_bfloat16 bias{};
  QkvCuda problem{.width = 64, .rope = {.tokens = 4096, .heads = 2, .kv_heads = 2, .head_dim = 64}};
  EXPECT_EQ(qkv_is_fused(ctx, problem), ctx.compute_capability() == 90);
  problem.rope.tokens = 8;
  EXPECT_FALSE(qkv_is_fused(ctx, problem));
  problem.rope.tokens = 4096;
  problem.rope.head_dim = 80;
  EXPECT_FALSE(qkv_is_fused(ctx, problem));
  EXPECT_THROW(qkv_cuda(ctx, problem), Error);
  problem.rope.head_dim = 64;
  problem.rope.bias = &bias;
  EXPECT_FALSE(qkv_is_fused(ctx, problem));
}

}  // namespace
}  // namespace twell
