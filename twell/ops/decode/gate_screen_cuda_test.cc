// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"
#include "twell/format/gate_screen_testing.h"
#include "twell/ops/decode/decode_layers.h"

namespace twell {
namespace {

class GateScreenCudaTest : public testing::TestWithParam<int64_t> {};

TEST_P(GateScreenCudaTest, IsTheReference) {
  TWELL_SKIP_WITHOUT_GPU();
  const int64_t width = GetParam(), ffn = 37, layers = 2;
  const CudaStream stream;
  const int64_t row_bytes = screen_row_bytes(width);
  const auto all_rows = poisoned<uint8_t>(layers * ffn * row_bytes);
  const auto all_errors = poisoned<float>(layers * ffn);
  for (int64_t layer = 0; layer < layers; ++layer) {
    auto weight = random_bf16(ffn * width, 1 + static_cast<uint64_t>(layer), 0.02f);
    for (int64_t i = 0; i < width; ++i) {
      weight[static_cast<size_t>(i)] = __float2bfloat16(0.0f);  // a row of zeros
      weight[static_cast<size_t>(width + i)] = __float2bfloat16(i == 5 ? 9.0f : 1e-3f);
    }
    weight[static_cast<size_t>(2 * width + 11)] = __float2bfloat16(INFINITY);
    weight[static_cast<size_t>(3 * width + 11)] = __float2bfloat16(NAN);
    const auto norm = random_bf16(width, 9);
    const auto device_weight = upload(weight), device_norm = upload(norm);
    TWELL_CUDA_CHECK(launch_make_gate_screen({.neurons = ffn,
                                              .width = width,
                                              .weight = device_weight.data(),
                                              .norm = device_norm.data(),
                                              .rows = all_rows.data() + layer * ffn * row_bytes,
                                              .errors = all_errors.data() + layer * ffn},
                                             stream.get()));
    stream.synchronize();

    const auto as_host = [](const std::vector<__nv_bfloat16>& values) {
      return reinterpret_cast<const BF16*>(values.data());
    };
    const GateScreenHost want =
        make_gate_screen(Matrix<const BF16>(as_host(weight), ffn, width), as_host(norm));
    std::vector<uint8_t> rows(want.rows.size());
    std::vector<float> errors(want.errors.size());
    TWELL_CUDA_CHECK(cudaMemcpy(rows.data(), all_rows.data() + layer * ffn * row_bytes, rows.size(),
                                cudaMemcpyDeviceToHost));
    TWELL_CUDA_CHECK(cudaMemcpy(errors.data(), all_errors.data() + layer * ffn,
                                errors.size() * sizeof(float), cudaMemcpyDeviceToHost));
    const auto bytes = static_cast<size_t>(screen_row_bytes(width));
    for (size_t row = 0; row < errors.size(); ++row) {
      if (!std::isfinite(want.errors[row])) {
        EXPECT_FALSE(std::isfinite(errors[row])) << "row " << row;
        continue;
      }
      EXPECT_TRUE(std::equal(rows.begin() + static_cast<int64_t>(row * bytes),
                             rows.begin() + static_cast<int64_t>((row + 1) * bytes),
                             want.rows.begin() + static_cast<int64_t>(row * bytes)))
          << "row " << row;
      EXPECT_NEAR(errors[row], want.errors[row], 1e-4f * want.errors[row]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, GateScreenCudaTest, testing::Values(64, 576, 2048, 4160));

}  // namespace
}  // namespace twell
