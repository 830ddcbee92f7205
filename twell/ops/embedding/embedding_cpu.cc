// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/ops/embedding/embedding.h"

namespace twell {
namespace {

constexpr int64_t kLine = 16;  // floats in a cache line

void check_shapes(std::span<const int32_t> ids, const WeightMatrix& table, ConstMatrixF rows) {
  TWELL_CHECK(rows.rows == static_cast<int64_t>(ids.size()) && rows.cols == table.cols,
              "embedding of {} ids from [{}, {}] does not fit [{}, {}]", ids.size(), table.rows,
              table.cols, rows.rows, rows.cols);
  for (size_t m = 0; m < ids.size(); ++m) {
    TWELL_CHECK(ids[m] >= 0 && ids[m] < table.rows,
                "token id {} at position {} is outside the vocabulary of {}", ids[m], m,
                table.rows);
  }
}

}  // namespace

void embedding_forward(Context& ctx, std::span<const int32_t> ids, const WeightMatrix& table,
                       MatrixF out, float scale) {
  check_shapes(ids, table, out);
  ctx.parallel_for(out.rows, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t m = begin; m < end; ++m) {
      float* const row = out.row(m);
      widen(table.at(ids[static_cast<size_t>(m)]), table.dtype, out.cols, row);
      if (scale == 1.0f) continue;
      for (int64_t i = 0; i < out.cols; ++i) row[i] *= scale;
    }
  });
}

void embedding_backward(Context& ctx, std::span<const int32_t> ids, ConstMatrixF d_out,
                        MatrixF d_table, float scale) {
  check_shapes(ids, d_table, d_out);
  // An id may occur many times. Columns are split, not tokens, so that every element has one thread
  // and one order of summation for any number of threads.
  const int64_t lines = (d_out.cols + kLine - 1) / kLine;
  ctx.parallel_for(lines, 4, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kLine;
    const int64_t count = std::min(end * kLine, d_out.cols) - first;
    for (int64_t m = 0; m < d_out.rows; ++m) {
      const float* from = d_out.row(m) + first;
      float* to = d_table.row(ids[static_cast<size_t>(m)]) + first;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] += scale * from[i];
    }
  });
}

}  // namespace twell
