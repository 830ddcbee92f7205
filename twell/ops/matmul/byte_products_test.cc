// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/byte_products.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <vector>

#include "twell/base/test_matrix.h"

namespace twell {
namespace {

struct Quantised {
  std::vector<int16_t> values;
  float scale = 0;
};

// The header's definition, value by value.
Quantised quantised(const float* a, int64_t k) {
  float largest = 1e-30f;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::abs(a[i]));
  Quantised out;
  const auto round_with = [&](float factor) {
    int64_t sum = 0;
    out.values.clear();
    for (int64_t i = 0; i < k; ++i) {
      out.values.push_back(static_cast<int16_t>(std::nearbyint(a[i] * factor)));
      sum += std::abs(int{out.values.back()});
    }
    out.scale = 1.0f / factor;
    return sum;
  };
  const float factor = 32767.0f / largest;
  const int64_t sum = round_with(factor), most = 2147483647 / 128;
  if (sum <= most) return out;
  const float share = static_cast<float>(most - k) / static_cast<float>(sum + k);
  EXPECT_LE(round_with(factor * share), most);
  return out;
}

struct Weights {
  Weights(int64_t rows, int64_t width) : cols(width), values(static_cast<size_t>(rows * width)) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<int8_t>(static_cast<int>(i * 7919 % 256) - 128);
    }
  }
  WeightMatrix view() const { return {values.data(), DType::kI8, std::ssize(values) / cols, cols}; }
  int64_t at(int64_t row, int64_t col) const {
    return values[static_cast<size_t>(row * cols + col)];
  }
  int64_t cols;
  std::vector<int8_t> values;
};

// C as defined; every sum is the exact one.
TestMatrix expected(const TestMatrix& a, const Weights& b, int64_t n, bool trans_b) {
  const int64_t k = a.cols();
  TestMatrix c(a.rows(), n, 3);
  for (int64_t row = 0; row < a.rows(); ++row) {
    const Quantised q = quantised(a.view().row(row), k);
    for (int64_t col = 0; col < n; ++col) {
      int64_t sum = 0;
      double exact = 0, size = 0;
      for (int64_t i = 0; i < k; ++i) {
        const int64_t weight = trans_b ? b.at(col, i) : b.at(i, col);
        sum += q.values[static_cast<size_t>(i)] * weight;
        exact += double{a(row, i)} * static_cast<double>(weight);
        size += static_cast<double>(std::abs(weight));
      }
      EXPECT_LE(std::abs(sum), 2147483647);
      c(row, col) = static_cast<float>(sum) * q.scale;
      // Half a step for each weight, and roundings of the factor, its inverse, and the product.
      EXPECT_NEAR(c(row, col), exact, 0.5 * double{q.scale} * size + 4e-7 * std::abs(exact));
    }
  }
  return c;
}

// Calls fn for each instruction set that this build has code for and this machine runs.
template <typename Fn>
void for_each_target(const Fn& fn) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    fn(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

void expect_everywhere(const TestMatrix& a, int64_t n, bool trans_b) {
  const int64_t k = a.cols();
  const Weights b(trans_b ? n : k, trans_b ? k : n);
  const TestMatrix want = expected(a, b, n, trans_b);
  for_each_target([&](const char* target) {
    for (const int threads : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << a.rows() << " x " << n << " x " << k << " trans "
                                        << trans_b << " " << target << " threads " << threads);
      Context ctx(threads);
      TestMatrix got(a.rows(), n, 3);
      (trans_b ? byte_row_products : byte_row_sums)(ctx, a.view(), b.view(), got.view());
      EXPECT_TRUE(got.same_bits(want));
    }
  });
}

TEST(ByteProducts, AreExactSumsOfRoundedActivationsOnEveryInstructionSet) {
  const int64_t shapes[][3] = {{1, 1, 1},    {1, 301, 260}, {2, 3, 64},   {3, 130, 67},
                               {5, 63, 255}, {4, 129, 256}, {1, 97, 771}, {16, 33, 40}};
  for (const auto& [m, n, k] : shapes) {
    for (const bool trans_b : {false, true})
      expect_everywhere(TestMatrix::random(m, k, 1), n, trans_b);
  }
}

// Equal values make the sum of |q| as large as it gets: with 32767 for each the sums would overflow
// from 512 columns on.
TEST(ByteProducts, RowsOfEqualValuesDoNotOverflow) {
  for (const int64_t k : {511, 513, 600, 5632, 40000}) {
    TestMatrix a(1, k);
    for (int64_t i = 0; i < k; ++i) a(0, i) = -3.0f;
    const int64_t n = 5;
    for (const bool trans_b : {false, true}) {
      Weights b(trans_b ? n : k, trans_b ? k : n);
      for (int8_t& value : b.values) value = -128;
      const TestMatrix want = expected(a, b, n, trans_b);
      Context ctx(2);
      TestMatrix got(1, n, 3);
      (trans_b ? byte_row_products : byte_row_sums)(ctx, a.view(), b.view(), got.view());
      EXPECT_TRUE(got.same_bits(want)) << k << " gives " << got(0, 0) << " for " << want(0, 0);
    }
  }
}

TEST(ByteProducts, RowsThatAreNotFiniteGiveNanAndLeaveOthersAlone) {
  const int64_t k = 70, n = 9;
  const Weights b(n, k);
  for (const float bad : {kNan, INFINITY, -INFINITY}) {
    for (const int64_t at : {0, 33, 69}) {
      TestMatrix a = TestMatrix::random(3, k, 1);
      const TestMatrix want = expected(a, b, n, true);
      a(1, at) = bad;
      for_each_target([&](const char* target) {
        Context ctx(1);
        TestMatrix got(3, n, 3);
        byte_row_products(ctx, a.view(), b.view(), got.view());
        for (int64_t col = 0; col < n; ++col) {
          EXPECT_TRUE(std::isnan(got(1, col))) << target << " " << bad << " at " << at;
          EXPECT_EQ(got(0, col), want(0, col));
          EXPECT_EQ(got(2, col), want(2, col));
        }
      });
    }
  }
}

TEST(ByteProducts, RowsOfZerosAndOfTheLargestAndSmallestValues) {
  for (const float size : {0.0f, 1e-45f, 1e-30f, 1e-20f, 1e30f, 3e38f}) {
    TestMatrix a = TestMatrix::random(2, 130, 1);
    for (int64_t i = 0; i < 130; ++i) a(1, i) = size * std::clamp(a(1, i), -1.0f, 1.0f);
    for (int64_t i = 0; i < 130; ++i) a(0, i) = -0.0f;
    const Weights b(7, 130);
    Context ctx(1);
    TestMatrix got(2, 7);
    byte_row_products(ctx, a.view(), b.view(), got.view());
    for (int64_t col = 0; col < 7; ++col) {
      EXPECT_EQ(got(0, col), 0.0f);
      double exact = 0, weights = 0;
      for (int64_t i = 0; i < 130; ++i) {
        exact += double{a(1, i)} * static_cast<double>(b.at(col, i));
        weights += static_cast<double>(std::abs(b.at(col, i)));
      }
      const double largest = std::max(double{size}, 1e-30);
      if (std::abs(exact) < 3e38) {
        EXPECT_NEAR(got(1, col), exact, 1.6e-5 * largest * weights) << size;
      }
    }
  }
}

}  // namespace
}  // namespace twell
