// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/bias/bias_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/rounding.h"
#include "twell/base/test_bf16.h"
#include "twell/ops/bias/bias.h"

namespace twell {
namespace {

// Rows of `width` values in `places` places each; those behind the width hold NaN.
std::vector<__nv_bfloat16> spread(const std::vector<__nv_bfloat16>& rows, int64_t width,
                                  int64_t places) {
  const auto count = static_cast<int64_t>(rows.size()) / width;
  std::vector<__nv_bfloat16> out(static_cast<size_t>(count * places), __float2bfloat16(NAN));
  for (int64_t m = 0; m < count; ++m) {
    std::copy_n(rows.begin() + m * width, width, out.begin() + m * places);
  }
  return out;
}

TEST(BiasForwardCudaTest, RoundsTheSumOnce) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  for (const auto& [tokens, width] :
       {std::pair<int64_t, int64_t>{1, 8}, {127, 264}, {3, 2056}, {0, 16}, {5, 3}, {70, 187}}) {
    const int64_t places = round_up(width, int64_t{8});
    const auto x = random_bf16(tokens * width, 1), bias = random_bf16(width, 2);
    const auto device_x = upload(spread(x, width, places)),
               device_bias = upload(spread(bias, width, places));
    TWELL_CUDA_CHECK(
        launch_bias_forward({tokens, width, device_bias.data(), device_x.data()}, stream.get()));
    stream.synchronize();
    const auto got = download(device_x);
    for (int64_t i = 0; i < tokens * width; ++i) {
      const float sum = __bfloat162float(x[static_cast<size_t>(i)]) +
                        __bfloat162float(bias[static_cast<size_t>(i % width)]);
      ASSERT_EQ(__bfloat162float(got[static_cast<size_t>(i / width * places + i % width)]),
                __bfloat162float(__float2bfloat16(sum)))
          << i;
    }
  }
}

TEST(BiasBackwardCudaTest, EqualsCpu) {
  TWELL_SKIP_WITHOUT_GPU();
  const CudaStream stream;
  Context cpu(1);
  for (const auto& [tokens, width] : {std::pair<int64_t, int64_t>{1, 8},
                                      {127, 264},
                                      {129, 2056},
                                      {5000, 40},
                                      {5, 3},
                                      {70, 187}}) {
    const int64_t places = round_up(width, int64_t{8});
    const auto d_y = random_bf16(tokens * width, 1);
    // Places behind the width have a value too, to which 0 is added.
    const std::vector<float> before = to_floats(random_bf16(places, 2)), d_y_f = to_floats(d_y);
    const auto device_d_y = upload(spread(d_y, width, places));
    const auto partial = poisoned<float>(bias_backward_partials(tokens) * places);
    std::vector<float> got[2];
    for (auto& repeat : got) {
      const auto d_bias = upload(before);
      TWELL_CUDA_CHECK(launch_bias_backward(
          {tokens, width, device_d_y.data(), d_bias.data(), partial.data()}, stream.get()));
      stream.synchronize();
      repeat = download(d_bias);
    }
    EXPECT_EQ(got[0], got[1]);
    std::vector<float> want = before;
    bias_backward(cpu, ConstMatrixF(d_y_f.data(), tokens, width), want.data());
    // f32 sums of M normal values, added in a different order.
    const float near = 1e-5f + 1e-7f * static_cast<float>(tokens);
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[0][i], want[i], near) << i;
  }
}

}  // namespace
}  // namespace twell
