// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/byte_linear_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/cuda_gtest.h"
#include "twell/base/test_bf16.h"

namespace twell {
namespace {

TEST(ByteLinearCudaTest, EqualsTheProductOfWhatTheBytesStandFor) {
  TWELL_HOPPER_TEST();
  struct Case {
    int64_t rows, cols, inner, stride;
    bool add;
  };
  for (const auto& [rows, cols, inner, stride, add] :
       {Case{1, 64, 64, 0, false}, Case{16, 272, 528, 0, true}, Case{127, 48, 2048, 4096, false},
        Case{128, 2048, 144, 0, true}, Case{300, 144, 256, 512, true}}) {
    SCOPED_TRACE(testing::Message() << rows << " x " << inner << " x " << cols);
    const int64_t pitch = stride == 0 ? inner : stride;
    auto x = random_bf16(rows * inner, 1), w = random_bf16(cols * inner, 2, 0.1f);
    // Rows of different sizes show a scale that is applied to another one.
    for (size_t i = 0; i < x.size(); ++i) {
      const auto row = static_cast<int>(i) / static_cast<int>(inner);
      x[i] = __float2bfloat16(std::ldexp(__bfloat162float(x[i]), row % 5));
    }
    for (size_t i = 0; i < w.size(); ++i) {
      const auto row = static_cast<int>(i) / static_cast<int>(inner);
      w[i] = __float2bfloat16(std::ldexp(__bfloat162float(w[i]), row % 3));
    }
    const auto host_x = to_floats(x), host_w = to_floats(w);
    const OwnedByteMatrix xs =
        quantise_rows(ByteType::kE4M3, ConstMatrixF(host_x.data(), rows, inner));
    const OwnedByteMatrix ws =
        quantise_rows(ByteType::kE4M3, ConstMatrixF(host_w.data(), cols, inner));
    std::vector<uint8_t> spaced(static_cast<size_t>(rows * pitch), 0x7f);  // NaN between the rows
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(xs.values.begin() + r * inner, inner, spaced.begin() + r * pitch);
    }
    const auto x_values = upload(spaced), w_values = upload(ws.values);
    const auto x_scales = upload(xs.scales), w_scales = upload(ws.scales);
    const auto before = random_bf16(rows * cols, 3);
    const auto y = upload(before);
    byte_linear_cuda(ctx, {.rows = rows,
                           .cols = cols,
                           .inner = inner,
                           .x = {x_values.data(), x_scales.data()},
                           .x_stride = stride,
                           .w = {w_values.data(), w_scales.data()},
                           .y = y.data(),
                           .add = add});
    stream.synchronize();
    const auto got = to_floats(download(y));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        double sum = 0.0, size = 0.0;
        for (int64_t k = 0; k < inner; ++k) {
          const double term = double{xs.view().at(r, k)} * double{ws.view().at(c, k)};
          sum += term;
          size += std::abs(term);
        }
        const auto at = static_cast<size_t>(r * cols + c);
        const double product = sum;
        if (add) sum += double{__bfloat162float(before[at])};
        // The result, and where it is added to, the product before, are rounded to bf16; sums have
        // at least 13 bits of mantissa.
        const double rounded = std::abs(sum) + (add ? std::abs(product) : 0.0);
        ASSERT_NEAR(got[at], sum, rounded * 0x1p-8 + size * 0x1p-12) << r << ", " << c;
      }
    }
  }
}

TEST(ByteLinearCudaTest, RefusesSizesThatAreNoMultiplesOf16) {
  TWELL_HOPPER_TEST();
  EXPECT_THROW(byte_linear_cuda(ctx, {.rows = 4, .cols = 64, .inner = 24}), Error);
  EXPECT_THROW(byte_linear_cuda(ctx, {.rows = 4, .cols = 24, .inner = 64}), Error);
}

}  // namespace
}  // namespace twell
