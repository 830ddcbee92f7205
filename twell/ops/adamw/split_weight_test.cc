// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/adamw/split_weight.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "twell/base/rng.h"

namespace twell {
namespace {

float bf16_of(SplitWeight weight) { return std::bit_cast<float>(uint32_t{weight.bf16} << 16); }

TEST(SplitWeightTest, HoldsEveryValueToTheBit) {
  // Every lower half beside some upper ones: of both signs, denormal, huge, infinite, NaN.
  for (const uint32_t upper : {0x0000u, 0x0001u, 0x3f80u, 0x3f81u, 0xbf80u, 0x7f7fu, 0x7f80u,
                               0x7fffu, 0x8000u, 0xff7fu, 0xffffu}) {
    for (uint32_t lower = 0; lower < 0x10000u; ++lower) {
      const uint32_t bits = upper << 16 | lower;
      ASSERT_EQ(join_weight(split_weight(bits)), bits) << std::hex << bits;
    }
  }
}

TEST(SplitWeightTest, UpperHalfIsTheNearestBf16) {
  for (uint64_t i = 0; i < 100000; ++i) {
    const float value = 0.02f * normal(1, 2, i);
    const float upper = bf16_of(split_weight(std::bit_cast<uint32_t>(value)));
    // bf16 has 8 bits: half a unit in the last place is at most 2^-8 of the power of two below.
    EXPECT_LE(std::abs(upper - value), std::exp2(std::ilogb(value)) * 0x1p-8f);
  }
  EXPECT_EQ(bf16_of(split_weight(0x3f808000u)), std::bit_cast<float>(0x3f810000u));
  EXPECT_EQ(bf16_of(split_weight(0x3f818000u)), std::bit_cast<float>(0x3f820000u));
  EXPECT_EQ(bf16_of(split_weight(0xbf808000u)), std::bit_cast<float>(0xbf810000u));
  EXPECT_EQ(bf16_of(split_weight(0x7f800000u)), std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace twell
