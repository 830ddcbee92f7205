// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/rms_norm/rms_norm.h"
#include "twell/ops/rms_norm/rows_testing.h"

namespace twell {
namespace {

struct NormCase {
  int64_t tokens, width;
  bool residual;
};

class RmsNormCudaTest : public testing::TestWithParam<NormCase> {};

TEST_P(RmsNormCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const auto [tokens, width, with_residual] = GetParam();
  const CudaStream stream;
  const auto x = random_bf16(tokens * width, 1, 2.0f), residual = random_bf16(tokens * width, 2),
             weight = random_bf16(width, 3);
  const auto device_x = upload(x), device_residual = upload(residual),
             device_weight = upload(weight);
  const auto sum = poisoned<__nv_bfloat16>(tokens * width);
  const auto y = poisoned<__nv_bfloat16>(tokens * width);
  TWELL_CUDA_CHECK(launch_rms_norm({.tokens = tokens,
                                    .width = width,
                                    .x = device_x.data(),
                                    .residual = with_residual ? device_residual.data() : nullptr,
                                    .sum = sum.data(),
                                    .weight = device_weight.data(),
                                    .y = y.data(),
                                    .eps = 1e-5f},
                                   stream.get()));
  stream.synchronize();

  // The same with the residual and y in another order of rows.
  const std::vector<int32_t> rows = shuffled_rows(tokens);
  const auto device_rows = upload(rows);
  const auto residual_there = upload(moved_to(rows, residual, width));
  const auto sum_again = poisoned<__nv_bfloat16>(tokens * width);
  const auto y_there = poisoned<__nv_bfloat16>(tokens * width);
  TWELL_CUDA_CHECK(launch_rms_norm({.tokens = tokens,
                                    .width = width,
                                    .x = device_x.data(),
                                    .residual = with_residual ? residual_there.data() : nullptr,
                                    .sum = sum_again.data(),
                                    .weight = device_weight.data(),
                                    .y = y_there.data(),
                                    .eps = 1e-5f,
                                    .residual_rows = device_rows.data(),
                                    .y_rows = device_rows.data()},
                                   stream.get()));
  stream.synchronize();
  EXPECT_EQ(to_floats(download(y_there)), moved_to(rows, to_floats(download(y)), width));
  if (with_residual) {
    EXPECT_EQ(to_floats(download(sum_again)), to_floats(download(sum)));
  }

  // The result of the CPU op on the rounded sum.
  std::vector<float> s = to_floats(x);
  const std::vector<float> r = to_floats(residual), w = to_floats(weight);
  if (with_residual) {
    for (size_t i = 0; i < s.size(); ++i) {
      s[i] = __bfloat162float(__float2bfloat16(s[i] + r[i]));
    }
    EXPECT_EQ(to_floats(download(sum)), s);
  }
  Context ctx(1);
  std::vector<float> want(s.size());
  rms_norm_forward(ctx, {.x = {s.data(), tokens, width},
                         .weight = w.data(),
                         .y = {want.data(), tokens, width},
                         .eps = 1e-5f});
  const auto got = to_floats(download(y));
  for (size_t i = 0; i < want.size(); ++i) {
    // One rounding to bf16, and the error of f32 sums in a different order.
    ASSERT_NEAR(got[i], want[i], std::abs(want[i]) * (std::ldexp(1.0f, -8) + 1e-5f) + 1e-30f) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormCudaTest,
                         testing::Values(NormCase{1, 8, true}, NormCase{3, 320, false},
                                         NormCase{129, 2048, true}, NormCase{2, 2056, true},
                                         NormCase{5, 5120, false}, NormCase{2, 16384, true},
                                         NormCase{1025, 2048, false}, NormCase{1024, 1000, true},
                                         NormCase{1030, 320, true}));

TEST(RmsNormCudaTest, PartialSumsOfFewerTokensFit) {
  int64_t most = 0;
  for (int64_t tokens = 1; tokens <= 40'000; ++tokens) {
    const int64_t now = rms_norm_backward_partials(tokens);
    ASSERT_GE(now, most) << tokens;
    most = now;
  }
}

TEST(RmsNormCudaTest, RefusesWidths) {
  TWELL_SKIP_WITHOUT_GPU();
  for (const int64_t width : {int64_t{12}, kMaxNormWidth + 8}) {
    EXPECT_EQ(launch_rms_norm({.tokens = 1, .width = width}, nullptr), cudaErrorInvalidValue);
  }
}

TEST(RmsNormBytesCuda, EqualsTheNormQuantisedAfterwards) {
  TWELL_GPU_TEST();
  for (const auto& [tokens, width] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 16}, {7, 272}, {130, 2048}, {1100, 1040}, {1500, 2048}, {40, 8192}, {3, 16384}}) {
    const auto x = upload(random_bf16(tokens * width, 1, 2.0f));
    const auto weight = upload(random_bf16(width, 2));
    const auto y = poisoned<__nv_bfloat16>(tokens * width);
    const std::vector<int32_t> order = shuffled_rows(tokens);
    const auto rows = upload(order);
    const auto want = poisoned<uint8_t>(tokens * width), got = poisoned<uint8_t>(tokens * width);
    const auto want_scales = poisoned<float>(tokens), got_scales = poisoned<float>(tokens);
    RmsNormCuda norm{.tokens = tokens,
                     .width = width,
                     .x = x.data(),
                     .weight = weight.data(),
                     .y = y.data(),
                     .y_rows = rows.data()};
    TWELL_CUDA_CHECK(launch_rms_norm(norm, stream.get()));
    TWELL_CUDA_CHECK(launch_quantise_rows({.rows = tokens,
                                           .cols = width,
                                           .x = y.data(),
                                           .values = want.data(),
                                           .scales = want_scales.data()},
                                          stream.get()));
    norm.y = nullptr;
    TWELL_CUDA_CHECK(launch_rms_norm_bytes(
        {.norm = norm, .values = got.data(), .scales = got_scales.data()}, stream.get()));
    stream.synchronize();
    EXPECT_EQ(download(got), download(want)) << tokens << " x " << width;
    EXPECT_EQ(download(got_scales), download(want_scales)) << tokens << " x " << width;
  }
}

}  // namespace
}  // namespace twell
