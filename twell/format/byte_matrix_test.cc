// SPDX-License-Identifier: Apache-2.0
#include "twell/format/byte_matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ByteMatrixTest, E4m3HasTheValuesOfItsDefinition) {
  EXPECT_EQ(e4m3_to_float(0x00), 0.0f);
  EXPECT_TRUE(std::signbit(e4m3_to_float(0x80)));
  EXPECT_EQ(e4m3_to_float(0x01), 0x1p-9f);  // least subnormal
  EXPECT_EQ(e4m3_to_float(0x08), 0x1p-6f);  // least normal
  EXPECT_EQ(e4m3_to_float(0x38), 1.0f);
  EXPECT_EQ(e4m3_to_float(0x7e), 448.0f);
  EXPECT_EQ(e4m3_to_float(0xfe), -448.0f);
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7f)));
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xff)));
}

TEST(ByteMatrixTest, ToE4m3RoundsToTheNearestValueAndTiesToEven) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const float low = e4m3_to_float(static_cast<uint8_t>(bits));
    const float high = e4m3_to_float(static_cast<uint8_t>(bits + 1));
    const float middle = 0.5f * (low + high);  // exact
    ASSERT_EQ(to_e4m3(low), bits);
    ASSERT_EQ(to_e4m3(-low), bits | 0x80);
    ASSERT_EQ(to_e4m3(std::nextafter(middle, 0.0f)), bits) << middle;
    ASSERT_EQ(to_e4m3(middle), bits % 2 == 0 ? bits : bits + 1) << middle;
    ASSERT_EQ(to_e4m3(std::nextafter(middle, kInfinity)), bits + 1) << middle;
  }
  EXPECT_EQ(to_e4m3(464.0f), 0x7e);  // would round up to 480
  EXPECT_EQ(to_e4m3(1e30f), 0x7e);
  EXPECT_EQ(to_e4m3(-kInfinity), 0xfe);
  EXPECT_EQ(to_e4m3(kNaN) & 0x7f, 0x7f);
}

TEST(ByteMatrixTest, QuantisedRowsKeepTheirLargestValueAndBoundTheError) {
  for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
    std::vector<float> row(257);
    for (size_t i = 0; i < row.size(); ++i) row[i] = 0.03f * normal(1, 2, i);
    row[100] = -0.5f;
    std::vector<uint8_t> bytes(row.size());
    const float scale = quantise_row(type, row, bytes);
    EXPECT_FLOAT_EQ(scale, 0.5f / most_of(type));
    std::vector<float> back(row.size());
    dequantise_row(type, bytes, scale, back);
    EXPECT_FLOAT_EQ(back[100], -0.5f);
    for (size_t i = 0; i < row.size(); ++i) {
      // e4m3: half a unit of 3 bits of mantissa, or of the subnormals; int8: half a step. Scaling
      // rounds twice more.
      const float half = type == ByteType::kE4M3
                             ? std::max(std::abs(row[i]) / 16.0f, scale * 0x1p-10f)
                             : 0.5f * scale;
      ASSERT_LE(std::abs(back[i] - row[i]), half * 1.00001f) << i;
    }
  }
}

TEST(ByteMatrixTest, RowsOfZerosAndTinyRowsAreFinite) {
  for (const ByteType type : {ByteType::kE4M3, ByteType::kInt8}) {
    const std::vector<float> zeros(8), tiny(8, std::numeric_limits<float>::denorm_min());
    for (const std::vector<float>& row : {zeros, tiny}) {
      std::vector<uint8_t> bytes(8, 0xaa);
      const float scale = quantise_row(type, row, bytes);
      EXPECT_GT(scale, 0.0f);
      EXPECT_TRUE(std::isfinite(1.0f / scale));
      EXPECT_EQ(bytes, std::vector<uint8_t>(8, 0));
    }
  }
}

TEST(ByteMatrixTest, RefusesValuesThatAreNotFinite) {
  std::vector<uint8_t> bytes(3);
  for (const float bad : {kNaN, kInfinity}) {
    const std::vector<float> row = {1.0f, 2.0f, bad};
    EXPECT_THROW(quantise_row(ByteType::kE4M3, row, bytes), InputError);
    EXPECT_THROW(quantise_row(ByteType::kInt8, row, bytes), InputError);
  }
}

TEST(ByteMatrixTest, RowsHaveScalesOfTheirOwn) {
  std::vector<float> values = {1.0f, 0.5f, 0.25f, 100.0f, 50.0f, -25.0f};
  const OwnedByteMatrix matrix = quantise_rows(ByteType::kE4M3, ConstMatrixF(values.data(), 2, 3));
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t c = 0; c < 3; ++c) {
      EXPECT_FLOAT_EQ(matrix.view().at(r, c), values[static_cast<size_t>(r * 3 + c)]);
    }
  }
}

}  // namespace
}  // namespace twell
