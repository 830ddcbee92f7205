// SPDX-License-Identifier: Apache-2.0
// Hybrid: the sparse activation format of training. A matrix [M, F] is split by rows. A row with at
// most W non-zeros is compact: its columns, ascending, and its values are entries
// 0 .. row_nnz[m] - 1 of row m of two arrays [M, W]; the rest of these is unspecified. A heavier
// row is stored whole, zeros included, in a dense tail. Heavy rows take tail rows in order.
//
// Overflow: a matrix with more heavy rows than the tail holds cannot be stored, and none of its
// arrays but row_nnz may be used. Its producer notices it and stays dense.
#pragma once

#include <cstdint>

#include "twell/base/matrix.h"

namespace twell {

struct HybridShape {
  int64_t rows = 0;           // M
  int64_t cols = 0;           // F
  int64_t ell_width = 0;      // W
  int64_t tail_capacity = 0;  // rows
};

// Views of the arrays; the memory is the caller's.
struct HybridF32 {
  HybridShape shape;
  int64_t tail_rows = 0;         // rows of the tail in use
  int32_t* row_nnz = nullptr;    // [M] non-zeros of each row, heavy rows too
  int32_t* tail_slot = nullptr;  // [M] -1: compact; else the row of the tail
  Matrix<uint32_t> index;        // [M, W] columns
  MatrixF value;                 // [M, W]
  MatrixF tail;                  // [tail_capacity, F]

  bool is_compact(int64_t row) const { return tail_slot[row] < 0; }
};

}  // namespace twell
