// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/matmul/matmul.h"

namespace twell {
namespace {

struct BackwardCase {
  int64_t rows, cols, inner;
  bool add;
};

// Outputs that are written start as NaN; those that are added to start from random values.
struct Gradients {
  std::vector<__nv_bfloat16> d_x;
  std::vector<float> d_w;
};

class LinearBackwardCudaTest : public testing::TestWithParam<BackwardCase> {};

TEST_P(LinearBackwardCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [rows, cols, inner, add] = GetParam();
  const CudaStream stream;
  CudaContext ctx(stream.get());
  const auto x = random_bf16(rows * inner, 1), w = random_bf16(cols * inner, 2),
             d_y = random_bf16(rows * cols, 3), d_x_before = random_bf16(rows * inner, 4);
  const std::vector<float> d_w_before = to_floats(random_bf16(cols * inner, 5));
  const auto device_x = upload(x), device_w = upload(w), device_d_y = upload(d_y);
  const auto on_device = [&, m = rows, n = cols, k = inner, add_to = add] {
    const auto d_x = add_to ? upload(d_x_before) : poisoned<__nv_bfloat16>(m * k);
    const auto d_w = add_to ? upload(d_w_before) : poisoned<float>(n * k);
    linear_backward_cuda(ctx, {.rows = m,
                               .cols = n,
                               .inner = k,
                               .x = device_x.data(),
                               .w = device_w.data(),
                               .d_y = device_d_y.data(),
                               .d_x = d_x.data(),
                               .d_x_add = add_to,
                               .d_w = d_w.data(),
                               .d_w_add = add_to});
    stream.synchronize();
    return Gradients{download(d_x), download(d_w)};
  };
  const Gradients got = on_device(), again = on_device();
  EXPECT_EQ(got.d_w, again.d_w);
  EXPECT_EQ(to_floats(got.d_x), to_floats(again.d_x));

  Context cpu(1);
  const std::vector<float> x_f = to_floats(x), w_f = to_floats(w), d_y_f = to_floats(d_y);
  std::vector<float> d_x = to_floats(d_x_before), d_w = d_w_before;
  if (!add) {
    std::fill(d_x.begin(), d_x.end(), 0.0f);
    std::fill(d_w.begin(), d_w.end(), 0.0f);
  }
  linear_backward(cpu, {.x = ConstMatrixF(x_f.data(), rows, inner),
                        .weight = ConstMatrixF(w_f.data(), cols, inner),
                        .d_y = ConstMatrixF(d_y_f.data(), rows, cols),
                        .d_x = MatrixF(d_x.data(), rows, inner),
                        .d_x_beta = 1.0f,
                        .d_weight = MatrixF(d_w.data(), cols, inner)});
  // Terms are products of two normal values: f32 sums of n of them are off by a few units in the
  // last place of n. d_x is rounded to bf16, and so may be the product added to it.
  const auto got_x = to_floats(got.d_x), before_x = to_floats(d_x_before);
  const float sums_x = std::ldexp(static_cast<float>(cols), -20) + 1e-5f;
  for (size_t i = 0; i < d_x.size(); ++i) {
    const float rounded = std::abs(d_x[i]) + (add ? std::abs(d_x[i] - before_x[i]) : 0.0f);
    ASSERT_NEAR(got_x[i], d_x[i], sums_x + rounded * std::ldexp(1.0f, -8)) << i;
  }
  const float sums_w = std::ldexp(static_cast<float>(rows), -20) + 1e-5f;
  for (size_t i = 0; i < d_w.size(); ++i) ASSERT_NEAR(got.d_w[i], d_w[i], sums_w) << i;
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, LinearBackwardCudaTest,
    testing::Values(BackwardCase{1, 8, 8, false}, BackwardCase{1, 264, 136, true},
                    BackwardCase{127, 72, 320, true}, BackwardCase{33, 57, 72, true},
                    BackwardCase{129, 320, 264, false}, BackwardCase{513, 1032, 512, true}));

TEST(LinearBackwardCudaTest, ReplaysAsGraph) {
  TWELL_GPU_TEST();
  const int64_t rows = 129, cols = 72, inner = 64;
  const auto x = upload(random_bf16(rows * inner, 1)), w = upload(random_bf16(cols * inner, 2)),
             d_y = upload(random_bf16(rows * cols, 3));
  const auto d_x = poisoned<__nv_bfloat16>(rows * inner);
  const auto d_w = upload(std::vector<float>(static_cast<size_t>(cols * inner)));
  const auto once = [&] {
    linear_backward_cuda(ctx, {.rows = rows,
                               .cols = cols,
                               .inner = inner,
                               .x = x.data(),
                               .w = w.data(),
                               .d_y = d_y.data(),
                               .d_x = d_x.data(),
                               .d_w = d_w.data()});
  };
  once();
  stream.synchronize();
  const auto first = download(d_w);
  replay_as_graph(stream, 3, once);
  const auto four_times = download(d_w);
  for (size_t i = 0; i < first.size(); ++i) {
    ASSERT_NEAR(four_times[i], 4.0f * first[i], 1e-5f * (1.0f + std::abs(first[i]))) << i;
  }
}

}  // namespace
}  // namespace twell
