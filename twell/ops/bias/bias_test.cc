// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/bias/bias.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "twell/base/test_matrix.h"

namespace twell {
namespace {

constexpr double kEps = 0x1p-23;

TEST(Bias, IsAddedToEveryRow) {
  Context ctx(2);
  for (const int64_t rows : {1, 127, 129}) {
    for (const int64_t cols : {1, 24, 130}) {
      const TestMatrix before = TestMatrix::random(rows, cols, 1, 3);
      const TestMatrix bias = TestMatrix::random(1, cols, 2);
      TestMatrix x = before;
      bias_forward(ctx, bias.view().data, x.view());
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t n = 0; n < cols; ++n) ASSERT_EQ(x(m, n), before(m, n) + bias(0, n));
      }
      EXPECT_TRUE(x.gaps_untouched());
    }
  }
}

TEST(Bias, GradientIsTheSumOfTheRowsWhateverTheThreads) {
  for (const int64_t rows : {1, 64, 127, 1000}) {
    for (const int64_t cols : {1, 24, 130}) {
      const TestMatrix d_y = TestMatrix::random(rows, cols, 3, 5);
      std::vector<float> once;
      for (const int threads : {1, 2, 3}) {
        Context ctx(threads);
        std::vector<float> d_bias(static_cast<size_t>(cols), 0.5f);
        bias_backward(ctx, d_y.view(), d_bias.data());
        for (int64_t n = 0; n < cols; ++n) {
          double sum = 0.5, magnitude = 0.5;
          for (int64_t m = 0; m < rows; ++m) {
            sum += double{d_y(m, n)};
            magnitude += std::abs(double{d_y(m, n)});
          }
          // At most 64 additions in a run, and one per run.
          const double steps = 64.0 + static_cast<double>(rows) / 64.0;
          ASSERT_NEAR(d_bias[static_cast<size_t>(n)], sum, steps * kEps * magnitude);
        }
        if (once.empty()) once = d_bias;
        EXPECT_EQ(d_bias, once);
      }
    }
  }
}

}  // namespace
}  // namespace twell
