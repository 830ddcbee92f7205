// SPDX-License-Identifier: Apache-2.0
#include "twell/base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "twell/base/rng.h"

namespace twell {
namespace {

float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

// The definition: sign, then mantissa * 2^exponent with `mantissa_bits` stored bits.
double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int sign = static_cast<int>(bits >> (exponent_bits + mantissa_bits)) & 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int fraction = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa_bits)
                    : std::ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return sign != 0 ? -magnitude : magnitude;
}

TEST(DType, NamesAndSizes) {
  EXPECT_EQ(dtype_name(DType::kF32), "F32");
  EXPECT_EQ(dtype_name(DType::kF16), "F16");
  EXPECT_EQ(dtype_name(DType::kBF16), "BF16");
  EXPECT_EQ(dtype_size(DType::kF32), 4u);
  EXPECT_EQ(dtype_size(DType::kF16), 2u);
  EXPECT_EQ(dtype_size(DType::kBF16), 2u);
}

TEST(BF16, EveryValueDecodesAndRoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BF16 value{static_cast<uint16_t>(bits)};
    const float wide = to_float(value);
    if ((bits & 0x7fff) > 0x7f80) {
      ASSERT_TRUE(std::isnan(wide));
      ASSERT_TRUE(std::isnan(to_float(to_bf16(wide))));
      continue;
    }
    if ((bits & 0x7fff) == 0x7f80) {
      ASSERT_TRUE(std::isinf(wide));
    } else {
      ASSERT_EQ(wide, decode(bits, 8, 7)) << std::hex << bits;
    }
    ASSERT_EQ(to_bf16(wide).bits, bits) << std::hex << bits;
  }
}

TEST(F16, EveryValueDecodesAndRoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float wide = f16_to_float(half);
    if ((bits & 0x7fff) > 0x7c00) {
      ASSERT_TRUE(std::isnan(wide));
      ASSERT_GT(float_to_f16(wide) & 0x7fff, 0x7c00);
      continue;
    }
    if ((bits & 0x7fff) == 0x7c00) {
      ASSERT_TRUE(std::isinf(wide));
    } else {
      ASSERT_EQ(wide, decode(bits, 5, 10)) << std::hex << bits;
    }
    ASSERT_EQ(std::signbit(wide), (bits & 0x8000) != 0);
    ASSERT_EQ(float_to_f16(wide), half) << std::hex << bits;
  }
}

// Between each pair of neighbours: the midpoint goes to the even one, either side to the nearer.
TEST(F16, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = f16_to_float(static_cast<uint16_t>(bits));
    const float high = f16_to_float(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;  // exact: one more bit than f16 has
    const uint32_t even = (bits & 1) != 0 ? bits + 1 : bits;
    ASSERT_EQ(float_to_f16(middle), even) << std::hex << bits;
    ASSERT_EQ(float_to_f16(std::nextafter(middle, low)), bits) << std::hex << bits;
    ASSERT_EQ(float_to_f16(std::nextafter(middle, high)), bits + 1) << std::hex << bits;
    ASSERT_EQ(float_to_f16(-middle), even | 0x8000u) << std::hex << bits;
  }
  const float largest = 65504.0f;
  EXPECT_EQ(float_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00) << "the midpoint past the largest goes to infinity";
  EXPECT_EQ(f16_to_float(float_to_f16(largest)), largest);
  EXPECT_EQ(float_to_f16(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(float_to_f16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(BF16, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const uint32_t even = (bits & 1) != 0 ? bits + 1 : bits;
    const uint32_t middle = (bits << 16) | 0x8000u;
    ASSERT_EQ(to_bf16(from_bits(middle)).bits, even) << std::hex << bits;
    ASSERT_EQ(to_bf16(from_bits(middle - 1)).bits, bits) << std::hex << bits;
    ASSERT_EQ(to_bf16(from_bits(middle + 1)).bits, bits + 1) << std::hex << bits;
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  // A NaN whose payload is all in the low half must not become infinity.
  EXPECT_TRUE(std::isnan(to_float(to_bf16(from_bits(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(from_bits(0xffffffffu)))));
}

}  // namespace
}  // namespace twell
