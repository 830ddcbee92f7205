// SPDX-License-Identifier: Apache-2.0
// A table [rows, D] worked on a slice of columns at a time, so that random rows of it come from the
// core's second-level cache: there they are read three times as fast as from beyond it. A slice is
// copied, because the same columns of rows a power of two apart would compete for a few cache sets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

// Columns per slice of a table of this many rows.
inline int64_t slice_columns(int64_t rows, int64_t width) {
  constexpr int64_t kBytes = 1152 * 1024;  // of the 2 MiB a server core has
  constexpr int64_t kMinColumns = 64;  // below four vectors the kernels lose more than they gain
  int64_t columns = kMinColumns;
  while (2 * columns * rows * static_cast<int64_t>(sizeof(float)) <= kBytes) columns *= 2;
  return std::min(columns, width);
}

// Floats of working memory for one thread.
inline int64_t slice_floats(int64_t rows, int64_t width) {
  const int64_t columns = slice_columns(rows, width);
  return columns == width ? 0 : rows * columns;
}

// Calls fn(column, slice [rows, columns]) for each slice; buffer holds slice_floats.
template <typename Fn>
void for_each_slice(ConstMatrixF table, float* buffer, const Fn& fn) {
  const int64_t columns = slice_columns(table.rows, table.cols);
  if (columns == table.cols) return fn(int64_t{0}, table);
  for (int64_t column = 0; column < table.cols; column += columns) {
    const MatrixF slice(buffer, table.rows, std::min(columns, table.cols - column));
    for (int64_t r = 0; r < table.rows; ++r) {
      std::copy_n(table.row(r) + column, slice.cols, slice.row(r));
    }
    fn(column, ConstMatrixF(slice));
  }
}

}  // namespace twell
