// SPDX-License-Identifier: Apache-2.0
#include "twell/format/byte_matrix_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

std::vector<__nv_bfloat16> rows_of_many_sizes(int64_t rows, int64_t cols) {
  std::vector<__nv_bfloat16> x = random_bf16(rows * cols, 3);
  for (size_t i = 0; i < x.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / cols;
    const float scale = row % 5 == 3 ? 0.0f : std::ldexp(1.0f, static_cast<int>(row % 40) - 20);
    x[i] = __float2bfloat16(scale * __bfloat162float(x[i]));
  }
  return x;
}

TEST(ByteMatrixCudaTest, QuantisesAsTheSpecificationDoes) {
  TWELL_GPU_TEST();
  for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
    for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 16}, {3, 2048}, {127, 272}, {1025, 528}, {1500, 4096}, {2000, 5632}}) {
      const std::vector<__nv_bfloat16> x = rows_of_many_sizes(rows, cols);
      const std::vector<float> host = to_floats(x);
      const OwnedByteMatrix want = quantise_rows(type, ConstMatrixF(host.data(), rows, cols));
      const auto device_x = upload(x);
      const auto values = poisoned<uint8_t>(rows * cols);
      const auto scales = poisoned<float>(rows);
      TWELL_CUDA_CHECK(launch_quantise_rows({.type = type,
                                             .rows = rows,
                                             .cols = cols,
                                             .x = device_x.data(),
                                             .values = values.data(),
                                             .scales = scales.data()},
                                            ctx.stream()));
      stream.synchronize();
      EXPECT_EQ(download(values), want.values) << byte_type_name(type) << rows << "x" << cols;
      EXPECT_EQ(download(scales), want.scales);

      // And back, with and without scales, also transposed.
      for (const bool scaled : {false, true}) {
        for (const bool transposed : {false, true}) {
          if (transposed && rows % 16 != 0) continue;
          const auto out = poisoned<__nv_bfloat16>(rows * cols);
          TWELL_CUDA_CHECK(
              launch_widen_rows({.type = type,
                                 .rows = rows,
                                 .cols = cols,
                                 .x = {values.data(), scaled ? scales.data() : nullptr},
                                 .transposed = transposed,
                                 .out = out.data()},
                                ctx.stream()));
          stream.synchronize();
          const std::vector<float> got = to_floats(download(out));
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < cols; ++c) {
              const auto at = static_cast<size_t>(r * cols + c);
              const float value = byte_to_float(type, want.values[at]) *
                                  (scaled ? want.scales[static_cast<size_t>(r)] : 1.0f);
              const auto to = static_cast<size_t>(transposed ? c * rows + r : r * cols + c);
              ASSERT_EQ(got[to], __bfloat162float(__float2bfloat16(value))) << r << " " << c;
            }
          }
        }
      }
    }
  }
}

TEST(ByteMatrixCudaTest, TransposesRaggedMatrices) {
  TWELL_GPU_TEST();
  constexpr int64_t kRows = 208, kCols = 144;
  std::vector<uint8_t> bytes(static_cast<size_t>(kRows * kCols));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 % 127);
  const auto values = upload(bytes);
  const auto out = poisoned<__nv_bfloat16>(kRows * kCols);
  TWELL_CUDA_CHECK(launch_widen_rows({.rows = kRows,
                                      .cols = kCols,
                                      .x = {values.data(), nullptr},
                                      .transposed = true,
                                      .out = out.data()},
                                     ctx.stream()));
  stream.synchronize();
  const std::vector<float> got = to_floats(download(out));
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; ++c) {
      ASSERT_EQ(got[static_cast<size_t>(c * kRows + r)],
                e4m3_to_float(bytes[static_cast<size_t>(r * kCols + c)]));
    }
  }
}

TEST(ByteMatrixCudaTest, TransposesBytes) {
  TWELL_GPU_TEST();
  constexpr int64_t kRows = 77, kCols = 144;
  std::vector<uint8_t> x(kRows * kCols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint8_t>(i * 37 + i / 144);
  const auto device_x = upload(x);
  const auto out = poisoned<uint8_t>(kRows * kCols);
  TWELL_CUDA_CHECK(launch_transpose_bytes(device_x.data(), kRows, kCols, out.data(), ctx.stream()));
  stream.synchronize();
  const std::vector<uint8_t> got = download(out);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; ++c) {
      ASSERT_EQ(got[static_cast<size_t>(c * kRows + r)], x[static_cast<size_t>(r * kCols + c)]);
    }
  }
}

TEST(ByteMatrixCudaTest, RowsWithValuesThatAreNotFiniteBecomeNaN) {
  TWELL_GPU_TEST();
  std::vector<__nv_bfloat16> x = random_bf16(2 * 64, 5);
  x[3] = __float2bfloat16(std::numeric_limits<float>::quiet_NaN());
  x[64 + 7] = __float2bfloat16(std::numeric_limits<float>::infinity());
  const auto device_x = upload(x);
  const auto values = poisoned<uint8_t>(2 * 64);
  const auto scales = poisoned<float>(2);
  TWELL_CUDA_CHECK(launch_quantise_rows({.rows = 2,
                                         .cols = 64,
                                         .x = device_x.data(),
                                         .values = values.data(),
                                         .scales = scales.data()},
                                        ctx.stream()));
  stream.synchronize();
  const std::vector<uint8_t> got = download(values);
  EXPECT_EQ(got[3] & 0x7f, 0x7f);
  EXPECT_EQ(got[64 + 7] & 0x7f, 0x7f);
}

TEST(ByteMatrixCudaTest, RefusesColumnsThatItCannotRead) {
  TWELL_GPU_TEST();
  EXPECT_EQ(launch_quantise_rows({.rows = 1, .cols = 24}, ctx.stream()), cudaErrorInvalidValue);
  EXPECT_EQ(launch_widen_rows({.rows = 1, .cols = 24}, ctx.stream()), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace twell
