// SPDX-License-Identifier: Apache-2.0
#include "twell/base/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace twell {
namespace {

// Known answers of philox4x32-10 published with Random123 (kat_vectors).
TEST(Philox, KnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(philox(0, 0, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint64_t ones = ~uint64_t{0};
  EXPECT_EQ(philox(ones, ones, ones), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // Counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0: digits of pi.
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, EveryArgumentMatters) {
  const std::set<std::array<uint32_t, 4>> blocks = {philox(1, 2, 3),
                                                    philox(2, 2, 3),
                                                    philox(1, 3, 3),
                                                    philox(1, 2, 4),
                                                    philox(1 + (uint64_t{1} << 32), 2, 3),
                                                    philox(1, 2 + (uint64_t{1} << 32), 3),
                                                    philox(1, 2, 3 + (uint64_t{1} << 32))};
  EXPECT_EQ(blocks.size(), 7u);
}

constexpr uint64_t kDraws = 200000;

TEST(Uniform, MomentsAndRange) {
  double sum = 0, squares = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double value = uniform(1, 2, i);
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
    squares += value * value;
  }
  // Five standard errors of the mean of kDraws draws.
  const double n = static_cast<double>(kDraws), spread = 5 / std::sqrt(n);
  EXPECT_NEAR(sum / n, 0.5, spread * std::sqrt(1.0 / 12));
  EXPECT_NEAR(squares / n, 1.0 / 3, spread * std::sqrt(4.0 / 45));
}

TEST(Normal, Moments) {
  double sum = 0, squares = 0, fourth = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double value = normal(1, 2, i);
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += value * value;
    fourth += value * value * value * value;
  }
  const double n = static_cast<double>(kDraws), spread = 5 / std::sqrt(n);
  EXPECT_NEAR(sum / n, 0.0, spread);
  EXPECT_NEAR(squares / n, 1.0, spread * std::sqrt(2.0));
  EXPECT_NEAR(fourth / n, 3.0, spread * std::sqrt(96.0));
}

TEST(UniformBelow, IsEvenAndInRange) {
  std::array<int, 7> counts{};
  for (uint64_t i = 0; i < kDraws; ++i) ++counts[uniform_below(3, 4, i, 7)];
  const double expected = static_cast<double>(kDraws) / 7;
  for (const int count : counts) EXPECT_NEAR(count, expected, 5 * std::sqrt(expected));
  EXPECT_EQ(uniform_below(3, 4, 0, 1), 0u);
  const uint64_t large = (uint64_t{1} << 63) + 1;
  for (uint64_t i = 0; i < 1000; ++i) EXPECT_LT(uniform_below(3, 4, i, large), large);
}

}  // namespace
}  // namespace twell
