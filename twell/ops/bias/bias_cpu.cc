// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/ops/bias/bias.h"

namespace twell {

void bias_forward(Context& ctx, const float* bias, MatrixF x) {
  ctx.parallel_for(x.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t m = begin; m < end; ++m) {
      float* const row = x.row(m);
      for (int64_t n = 0; n < x.cols; ++n) row[n] += bias[n];
    }
  });
}

void bias_backward(Context& ctx, ConstMatrixF d_y, float* d_bias) {
  // A thread owns columns, and first sums short runs of rows, which keeps precision with many rows.
  constexpr int64_t kColumns = 64, kRows = 64;
  ctx.parallel_for(d_y.cols, kColumns, [&](int64_t begin, int64_t end, int) {
    for (int64_t col = begin; col < end; col += kColumns) {
      const int64_t width = std::min(kColumns, end - col);
      for (int64_t first = 0; first < d_y.rows; first += kRows) {
        float sum[kColumns] = {};
        for (int64_t m = first; m < std::min(d_y.rows, first + kRows); ++m) {
          const float* const row = d_y.row(m) + col;
          for (int64_t n = 0; n < width; ++n) sum[n] += row[n];
        }
        for (int64_t n = 0; n < width; ++n) d_bias[col + n] += sum[n];
      }
    }
  });
}

}  // namespace twell
