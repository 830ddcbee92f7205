// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/linear_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

struct LinearCase {
  int64_t rows, cols, inner;
};

class LinearCudaTest : public testing::TestWithParam<LinearCase> {};

// |error| <= 2^-8 |y| for the rounding of y, and 2^-20 of sum |x| |w| for that of the f32 sums.
TEST_P(LinearCudaTest, EqualsDoublePrecision) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [rows, cols, inner] = GetParam();
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto x = random_bf16(rows * inner, 1), w = random_bf16(cols * inner, 2);
  const auto device_x = upload(x), device_w = upload(w);
  const auto y = poisoned<__nv_bfloat16>(rows * cols);
  const auto y_f32 = poisoned<float>(rows * cols);
  LinearCuda problem{rows, cols, inner, device_x.data(), device_w.data(), y.data(), false};
  linear_cuda(ctx, problem);
  problem.y = y_f32.data();
  problem.f32_out = true;
  linear_cuda(ctx, problem);
  const auto before = random_bf16(rows * cols, 5);
  const auto sum = upload(before);
  problem.y = sum.data();
  problem.f32_out = false;
  problem.add = true;
  linear_cuda(ctx, problem);
  stream.synchronize();
  const auto got = to_floats(download(y)), got_sum = to_floats(download(sum)),
             added = to_floats(before);
  const auto got_f32 = download(y_f32);
  const auto x_f = to_floats(x), w_f = to_floats(w);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      double want = 0.0, size = 0.0;
      for (int64_t k = 0; k < inner; ++k) {
        const double term = static_cast<double>(x_f[static_cast<size_t>(m * inner + k)]) *
                            w_f[static_cast<size_t>(n * inner + k)];
        want += term;
        size += std::abs(term);
      }
      const auto at = static_cast<size_t>(m * cols + n);
      const double sums = size * std::ldexp(1.0, -20);
      ASSERT_NEAR(got_f32[at], want, sums) << m << ", " << n;
      ASSERT_NEAR(got[at], want, sums + std::abs(want) * std::ldexp(1.0, -8)) << m << ", " << n;
      // cuBLASLt may round the product before it adds.
      const double both = want + added[at];
      ASSERT_NEAR(got_sum[at], both, sums + (std::abs(both) + std::abs(want)) * std::ldexp(1.0, -8))
          << m << ", " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearCudaTest,
                         testing::Values(LinearCase{1, 8, 8}, LinearCase{1, 136, 2048},
                                         LinearCase{2, 264, 264}, LinearCase{3, 72, 1000},
                                         LinearCase{5, 40, 328}, LinearCase{8, 1016, 512},
                                         LinearCase{9, 48, 64}, LinearCase{1, 257, 40},
                                         LinearCase{33, 57, 72}, LinearCase{129, 264, 320}));

// The few-row kernels' result for a token does not depend on the tokens beside it.
TEST(LinearCudaTest, FewRowsDoNotDependOnEachOther) {
  TWELL_GPU_TEST();
  const int64_t cols = 264, inner = 1032;
  const auto x = upload(random_bf16(8 * inner, 3)), w = upload(random_bf16(cols * inner, 4));
  const auto together = poisoned<float>(8 * cols);
  linear_cuda(ctx, {8, cols, inner, x.data(), w.data(), together.data(), true});
  for (int64_t rows : {1, 2, 4}) {
    const auto apart = poisoned<float>(8 * cols);
    for (int64_t m = 0; m < 8; m += rows) {
      linear_cuda(
          ctx, {rows, cols, inner, x.data() + m * inner, w.data(), apart.data() + m * cols, true});
    }
    stream.synchronize();
    EXPECT_EQ(download(apart), download(together)) << rows;
  }
}

}  // namespace
}  // namespace twell
