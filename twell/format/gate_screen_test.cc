// SPDX-License-Identifier: Apache-2.0
// The bound holds for every x: no product with a screen is off by more than the row's error.
#include "twell/format/gate_screen_testing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "twell/base/rng.h"

namespace twell {
namespace {

using Values = std::vector<BF16>;

Values make_values(int64_t n, const std::function<float(int64_t)>& value) {
  Values out;
  for (int64_t i = 0; i < n; ++i) out.push_back(to_bf16(value(i)));
  return out;
}
Values random_values(int64_t n, uint64_t stream, float scale = 1.0f) {
  return make_values(
      n, [&](int64_t i) { return scale * normal(5, stream, static_cast<uint64_t>(i)); });
}

// y / rms(y) * norm, rounded to bf16.
Values rms_norm(const std::vector<double>& y, const Values& norm) {
  double sum = 0.0;
  for (const double v : y) sum += v * v;
  const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(y.size()) + 1e-5);
  return make_values(std::ssize(y), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    return static_cast<float>(y[at] * inverse) * to_float(norm[at]);
  });
}

double dot(const BF16* a, const Values& b) {
  double sum = 0.0;
  for (size_t i = 0; i < b.size(); ++i) sum += double{to_float(a[i])} * to_float(b[i]);
  return sum;
}

struct ScreenCase {
  const char* name;
  int64_t width;
  std::function<float(int64_t i)> scale;  // of the weights in column i
  std::function<float(int64_t i)> norm;
};

float one(int64_t) { return 1.0f; }

class GateScreenTest : public testing::TestWithParam<ScreenCase> {
 protected:
  static constexpr int64_t kRows = 6;
  const int64_t width_ = GetParam().width;
  const Values weight_ = make_values(kRows * width_, [this](int64_t i) {
    return GetParam().scale(i % width_) * normal(5, 1, static_cast<uint64_t>(i));
  });
  const Values norm_ = make_values(width_, [](int64_t i) { return GetParam().norm(i); });
  const GateScreenHost screen_ =
      make_gate_screen(Matrix<const BF16>(weight_.data(), kRows, width_), norm_.data());

  const BF16* weight(int64_t row) const { return weight_.data() + row * width_; }
  const uint8_t* row(int64_t row) const {
    return screen_.rows.data() + row * screen_row_bytes(width_);
  }
  // The value that the screen has in place of a weight.
  double taken(int64_t r, int64_t column) const {
    const int64_t piece = column / kScreenPiece, in_piece = column % kScreenPiece;
    const int64_t columns = std::min<int64_t>(kScreenPiece, width_ - piece * kScreenPiece);
    const uint8_t* from = row(r) + piece * screen_piece_bytes(kScreenPiece);
    BF16 scale;
    std::memcpy(&scale, from + columns + in_piece / kScreenBlock * 2, sizeof(scale));
    return double{to_float(scale)} * static_cast<int8_t>(from[in_piece]);
  }
};

TEST_P(GateScreenTest, NoProductIsFurtherOffThanTheError) {
  for (uint64_t draw = 0; draw < 20; ++draw) {
    std::vector<double> y;
    for (int64_t i = 0; i < width_; ++i) {
      // Every third draw has a few values far larger than the others, as residual streams do.
      const double large = draw % 3 == 2 && i % 97 == 5 ? 60.0 : 1.0;
      y.push_back(large * normal(9, draw, static_cast<uint64_t>(i)));
    }
    const Values x = rms_norm(y, norm_);
    for (int64_t r = 0; r < kRows; ++r) {
      const double error = screen_.errors[static_cast<size_t>(r)];
      EXPECT_LE(std::fabs(screen_product(row(r), x.data(), width_) - dot(weight(r), x)), error);
    }
  }
}

// The worst x points along the difference between the weights and the screen.
TEST_P(GateScreenTest, TheErrorIsNearlyReached) {
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<double> y;
    for (int64_t i = 0; i < width_; ++i) {
      y.push_back(1e9 * (to_float(weight(r)[i]) - taken(r, i)) *
                  to_float(norm_[static_cast<size_t>(i)]));
    }
    const Values x = rms_norm(y, norm_);
    const double error = screen_.errors[static_cast<size_t>(r)];
    const double off = std::fabs(screen_product(row(r), x.data(), width_) - dot(weight(r), x));
    EXPECT_LE(off, error);
    EXPECT_GE(off, 0.85 * error);
  }
}

TEST_P(GateScreenTest, TheErrorIsSmallBesideTheProducts) {
  double off = 0.0, size = 0.0;
  for (int64_t r = 0; r < kRows; ++r) {
    off += screen_.errors[static_cast<size_t>(r)];
    for (int64_t i = 0; i < width_; ++i) {
      size += std::pow(to_float(weight(r)[i]) * to_float(norm_[static_cast<size_t>(i)]), 2);
    }
  }
  // Compared with the largest possible product, sqrt(D) |w n|.
  const double largest = std::sqrt(static_cast<double>(width_) * size / kRows);
  EXPECT_LT(off / kRows, 0.02 * largest);
}

INSTANTIATE_TEST_SUITE_P(
    Rows, GateScreenTest,
    testing::Values(
        ScreenCase{"one_block", 64, one, one}, ScreenCase{"padded", 576, one, one},
        ScreenCase{"of_models", 2048, one,
                   [](int64_t i) { return 0.3f + 0.001f * static_cast<float>(i); }},
        ScreenCase{"pieces", 2 * kScreenPiece + 192, one, one},
        ScreenCase{"a_large_column", 1024, [](int64_t i) { return i == 77 ? 20.0f : 1.0f; }, one},
        ScreenCase{"zero_columns", 256, [](int64_t i) { return i < 130 ? 0.0f : 1.0f; }, one},
        ScreenCase{"small", 256, [](int64_t) { return 1e-4f; }, one}),
    [](const auto& param) { return std::string(param.param.name); });

TEST(GateScreen, SaysNothingOfWhatItCannotBound) {
  const int64_t width = 128;
  const Values norm = make_values(width, one);
  const float inf = std::numeric_limits<float>::infinity();
  for (const float odd : {inf, -inf, std::numeric_limits<float>::quiet_NaN(), 1e-25f}) {
    Values weight = random_values(width, 1, odd == 1e-25f ? odd : 1.0f);
    weight[70] = to_bf16(odd);
    const GateScreenHost screen =
        make_gate_screen(Matrix<const BF16>(weight.data(), 1, width), norm.data());
    const Values x = random_values(width, 2);
    EXPECT_FALSE(screen_product(screen.rows.data(), x.data(), width) < -screen.errors[0]) << odd;
  }
  const Values weight = random_values(width, 1);
  const GateScreenHost screen =
      make_gate_screen(Matrix<const BF16>(weight.data(), 1, width), norm.data());
  for (const float odd : {inf, -inf, std::numeric_limits<float>::quiet_NaN(), 1e-35f, 1e37f}) {
    Values x = random_values(width, 3, odd == 1e-35f ? odd : 1.0f);
    x[3] = to_bf16(odd);
    EXPECT_FALSE(screen_product(screen.rows.data(), x.data(), width) < -screen.errors[0]) << odd;
  }
}

TEST(GateScreen, RowsOfZeros) {
  const int64_t width = 64;
  const Values weight(static_cast<size_t>(width), BF16{}), norm = make_values(width, one);
  const GateScreenHost screen =
      make_gate_screen(Matrix<const BF16>(weight.data(), 1, width), norm.data());
  EXPECT_EQ(screen.errors[0], 0.0f);
  EXPECT_EQ(screen_product(screen.rows.data(), norm.data(), width), 0.0);
}

}  // namespace
}  // namespace twell
