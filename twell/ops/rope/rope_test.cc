// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/error.h"
#include "twell/base/test_matrix.h"

namespace twell {
namespace {

constexpr double kEps = 0x1p-23;

TEST(Rope, MatchesTheRotationInDouble) {
  Context ctx(2);
  for (const int64_t head_dim : {2, 6, 34, 64, 128}) {
    const RopeTable table(500, head_dim, 10000.0);
    const std::vector<int32_t> positions = {0, 1, 499, 7, 7, 250, 3};
    const int64_t rows = static_cast<int64_t>(positions.size()), heads = 3, half = head_dim / 2;
    const auto before = TestMatrix::random(rows, heads * head_dim, 1, 4);
    TestMatrix x = before;
    rope(ctx, table, positions, x.view());
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t i = 0; i < half; ++i) {
          const double angle =
              positions[static_cast<size_t>(m)] *
              std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
          const int64_t at = head * head_dim + i;
          const double a = before(m, at), b = before(m, at + half);
          const double tolerance = 2 * kEps * std::hypot(a, b);
          ASSERT_NEAR(x(m, at), a * std::cos(angle) - b * std::sin(angle), tolerance);
          ASSERT_NEAR(x(m, at + half), b * std::cos(angle) + a * std::sin(angle), tolerance);
        }
      }
    }
    EXPECT_TRUE(x.gaps_untouched());

    rope(ctx, table, positions, x.view(), /*inverse=*/true);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t c = 0; c < heads * head_dim; ++c) ASSERT_NEAR(x(m, c), before(m, c), 16 * kEps);
    }
  }
}

TEST(Rope, GivenAnglesAndAScale) {
  Context ctx(1);
  const double angles[] = {0.5, 0.01};
  const RopeTable table(20, angles, 1.25);
  const std::vector<int32_t> positions = {0, 3, 19};
  const auto before = TestMatrix::random(3, 4, 1);
  TestMatrix x = before;
  rope(ctx, table, positions, x.view());
  for (int64_t m = 0; m < 3; ++m) {
    for (int64_t i = 0; i < 2; ++i) {
      const double angle = positions[static_cast<size_t>(m)] * angles[i];
      const double a = before(m, i), b = before(m, i + 2);
      const double expected = 1.25 * (a * std::cos(angle) - b * std::sin(angle));
      EXPECT_NEAR(x(m, i), expected, 2 * kEps * 1.25 * std::hypot(a, b));
    }
  }
}

// The gradient of <rope(x), g> with respect to x is the inverse rotation of g.
TEST(Rope, InverseIsTheTranspose) {
  Context ctx(3);
  const RopeTable table(64, 10, 100000.0);
  std::vector<int32_t> positions(40);
  for (size_t m = 0; m < positions.size(); ++m) positions[m] = static_cast<int32_t>(63 - m);
  const auto x = TestMatrix::random(40, 20, 1), g = TestMatrix::random(40, 20, 2);
  TestMatrix forward = x, backward = g;
  rope(ctx, table, positions, forward.view());
  rope(ctx, table, positions, backward.view(), /*inverse=*/true);
  double left = 0, right = 0, norm_x = 0, norm_g = 0;
  for (int64_t m = 0; m < 40; ++m) {
    for (int64_t c = 0; c < 20; ++c) {
      left += double{forward(m, c)} * g(m, c);
      right += double{x(m, c)} * backward(m, c);
      norm_x += double{x(m, c)} * x(m, c);
      norm_g += double{g(m, c)} * g(m, c);
    }
  }
  EXPECT_NEAR(left, right, 2 * kEps * std::sqrt(norm_x * norm_g));
}

TEST(Rope, RefusesBadPositionsAndShapes) {
  Context ctx(1);
  const RopeTable table(8, 4, 10000.0);
  auto x = TestMatrix::random(2, 8, 1), odd = TestMatrix::random(2, 6, 1);
  const auto before = x;
  for (const int32_t bad : {-1, 8}) {
    const std::vector<int32_t> positions = {0, bad};
    EXPECT_THROW(rope(ctx, table, positions, x.view()), Error);
    EXPECT_TRUE(x.same_bits(before)) << "a refused call must change nothing";
  }
  const std::vector<int32_t> positions = {0, 1}, longer = {0, 1, 2};
  EXPECT_THROW(rope(ctx, table, longer, x.view()), Error);
  EXPECT_THROW(rope(ctx, table, positions, odd.view()), Error);
  EXPECT_THROW(RopeTable(8, 5, 10000.0), Error);
}

}  // namespace
}  // namespace twell
