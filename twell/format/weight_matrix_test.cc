// SPDX-License-Identifier: Apache-2.0
#include "twell/format/weight_matrix.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace twell {
namespace {

// Every value of both 16-bit dtypes, from an odd place in memory on, with and without a tail.
TEST(WeightMatrix, WidensEveryValueExactly) {
  std::vector<uint16_t> bits(65536 + 7);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const size_t first : {size_t{0}, size_t{3}}) {
      std::vector<float> out(65536 + 1, 5.0f);
      const auto* values = reinterpret_cast<const std::byte*>(bits.data() + first);
      widen(values, dtype, 65536, out.data());
      int64_t wrong = 0;
      for (size_t i = 0; i < 65536; ++i) {
        const uint16_t stored = bits[first + i];
        const float want = dtype == DType::kBF16 ? to_float(BF16{stored}) : f16_to_float(stored);
        const bool equal = std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(want);
        wrong += std::isnan(want) ? !std::isnan(out[i]) : !equal;
      }
      EXPECT_EQ(wrong, 0) << dtype_name(dtype);
      EXPECT_EQ(out.back(), 5.0f);
    }
  }
}

TEST(WeightMatrix, WidensSignedBytes) {
  for (size_t count = 0; count <= 256; ++count) {  // tails of every length
    std::vector<int8_t> bytes(count);
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<int8_t>(i - 128);
    std::vector<float> out(count + 1, 5.0f);
    widen(reinterpret_cast<const std::byte*>(bytes.data()), DType::kI8, static_cast<int64_t>(count),
          out.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], static_cast<float>(bytes[i]));
    ASSERT_EQ(out.back(), 5.0f);
  }
}

TEST(WeightMatrix, ViewsF32MatricesWithTheirStride) {
  float values[12];
  const MatrixF matrix(values, 2, 4, 6);
  const WeightMatrix view = matrix;
  EXPECT_EQ(view.at(1, 3), reinterpret_cast<const std::byte*>(values + 9));
  EXPECT_EQ(view.slice_rows(1, 1).f32().row(0), values + 6);
  EXPECT_TRUE(WeightMatrix().empty());
}

}  // namespace
}  // namespace twell
