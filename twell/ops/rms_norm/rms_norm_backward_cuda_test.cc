// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/rms_norm/rms_norm.h"
#include "twell/ops/rms_norm/rows_testing.h"

namespace twell {
namespace {

struct BackwardCase {
  int64_t tokens, width;
  bool residual;
};

struct Gradients {
  std::vector<float> d_s, d_weight;
};

class RmsNormBackwardCudaTest : public testing::TestWithParam<BackwardCase> {};

TEST_P(RmsNormBackwardCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, width, with_residual] = GetParam();
  const float scale = with_residual ? 0.75f : 1.0f;
  const CudaStream stream;
  const auto s = random_bf16(tokens * width, 1, 2.0f), weight = random_bf16(width, 2),
             d_y = random_bf16(tokens * width, 3), residual = random_bf16(tokens * width, 4);
  const auto device_s = upload(s), device_weight = upload(weight), device_d_y = upload(d_y),
             device_residual = upload(residual);
  const std::vector<float> d_weight_before = to_floats(random_bf16(width, 5));
  const auto partial = poisoned<float>(rms_norm_backward_partials(tokens) * width);
  const auto on_device = [&, m = tokens, d = width, residual_given = with_residual](bool in_place) {
    const auto d_weight = upload(d_weight_before);
    const auto out = in_place ? upload(residual) : poisoned<__nv_bfloat16>(m * d);
    const __nv_bfloat16* from = in_place ? out.data() : device_residual.data();
    TWELL_CUDA_CHECK(launch_rms_norm_backward({.tokens = m,
                                               .width = d,
                                               .s = device_s.data(),
                                               .weight = device_weight.data(),
                                               .d_y = device_d_y.data(),
                                               .d_residual = residual_given ? from : nullptr,
                                               .d_s = out.data(),
                                               .d_weight = d_weight.data(),
                                               .partial = partial.data(),
                                               .eps = 1e-5f,
                                               .scale = scale},
                                              stream.get()));
    stream.synchronize();
    return Gradients{to_floats(download(out)), download(d_weight)};
  };
  const Gradients got = on_device(false), again = on_device(true);
  EXPECT_EQ(got.d_s, again.d_s);
  EXPECT_EQ(got.d_weight, again.d_weight);

  // The same with d_y in another order of rows, and d_s copied to that order.
  const std::vector<int32_t> rows = shuffled_rows(tokens);
  const auto device_rows = upload(rows);
  const auto d_y_there = upload(moved_to(rows, d_y, width));
  const auto out = poisoned<__nv_bfloat16>(tokens * width),
             copy = poisoned<__nv_bfloat16>(tokens * width);
  const auto d_weight_there = upload(d_weight_before);
  TWELL_CUDA_CHECK(
      launch_rms_norm_backward({.tokens = tokens,
                                .width = width,
                                .s = device_s.data(),
                                .weight = device_weight.data(),
                                .d_y = d_y_there.data(),
                                .d_residual = with_residual ? device_residual.data() : nullptr,
                                .d_s = out.data(),
                                .d_weight = d_weight_there.data(),
                                .partial = partial.data(),
                                .eps = 1e-5f,
                                .scale = scale,
                                .d_y_rows = device_rows.data(),
                                .copy_rows = device_rows.data(),
                                .d_s_copy = copy.data()},
                               stream.get()));
  stream.synchronize();
  EXPECT_EQ(to_floats(download(out)), got.d_s);
  EXPECT_EQ(to_floats(download(copy)), moved_to(rows, got.d_s, width));
  EXPECT_EQ(download(d_weight_there), got.d_weight);

  Context ctx(1);
  const std::vector<float> s_f = to_floats(s), weight_f = to_floats(weight), d_y_f = to_floats(d_y),
                           residual_f = to_floats(residual);
  std::vector<float> y(s_f.size()), inv_rms(static_cast<size_t>(tokens)), d_s(s_f.size());
  std::vector<float> d_weight = d_weight_before;
  rms_norm_forward(ctx, {.x = ConstMatrixF(s_f.data(), tokens, width),
                         .weight = weight_f.data(),
                         .y = MatrixF(y.data(), tokens, width),
                         .inv_rms = inv_rms.data(),
                         .eps = 1e-5f});
  if (with_residual) d_s = residual_f;
  rms_norm_backward(ctx, {.s = ConstMatrixF(s_f.data(), tokens, width),
                          .weight = weight_f.data(),
                          .inv_rms = inv_rms.data(),
                          .d_y = ConstMatrixF(d_y_f.data(), tokens, width),
                          .d_s = MatrixF(d_s.data(), tokens, width),
                          .d_weight = d_weight.data(),
                          .scale = scale});
  for (size_t i = 0; i < d_s.size(); ++i) {
    // One rounding to bf16, and f32 terms of at most a few tens that may cancel.
    ASSERT_NEAR(got.d_s[i], d_s[i], std::abs(d_s[i]) * std::ldexp(1.0f, -8) + 2e-5f) << i;
  }
  // f32 sums of M terms of magnitude near one.
  const float sums = 1e-5f + 1e-6f * static_cast<float>(tokens);
  for (size_t i = 0; i < d_weight.size(); ++i) {
    ASSERT_NEAR(got.d_weight[i], d_weight[i], sums + 1e-5f * std::abs(d_weight[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormBackwardCudaTest,
                         testing::Values(BackwardCase{1, 8, true}, BackwardCase{127, 320, false},
                                         BackwardCase{129, 2048, true},
                                         BackwardCase{9000, 72, true}, BackwardCase{2, 2056, true},
                                         BackwardCase{5, 5120, false},
                                         BackwardCase{17, 16384, true}));

TEST(RmsNormBackwardCudaTest, RefusesWidths) {
  TWELL_SKIP_WITHOUT_GPU();
  for (const int64_t width : {int64_t{12}, kMaxNormWidth + 8}) {
    EXPECT_EQ(launch_rms_norm_backward({.tokens = 1, .width = width}, nullptr),
              cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace twell
