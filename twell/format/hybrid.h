// SPDX-License-Identifier: Apache-2.0
// Hybrid: the sparse activation format of training. A matrix [M, F] is split by rows. A row with at
// most W non-zeros is compact: its columns, ascending, and its values are entries
// 0 .. row_nnz[m] - 1 of row m of two arrays [M, W]; the rest of these is unspecified. A heavier
// row is stored whole, zeros included, in a dense tail. Heavy rows take tail rows in order.
//
// Overflow: a matrix with more heavy rows than the tail holds cannot be stored, and none of its
// arrays but row_nnz may be used. Packing reports it, and the producer stays dense.
#pragma once

#include <cstdint>
#include <string>

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

// Why this shape cannot be stored; empty when it can.
std::string hybrid_unsupported(const HybridShape& shape);

// Bytes of all arrays, each aligned to kAlignment; value_planes counts the arrays of values that
// share one pattern (training keeps gate and up).
int64_t hybrid_bytes(const HybridShape& shape, int64_t value_planes = 1);

// The executable specification of the layout. Elements that compare unequal to 0 are kept, NaN too.
// Returns false if the heavy rows exceed the tail; then only row_nnz is defined.
[[nodiscard]] bool pack_hybrid(ConstMatrixF dense, HybridF32& hybrid);
// Writes every element of dense [M, F].
void unpack_hybrid(const HybridF32& hybrid, MatrixF dense);

struct HybridStats {
  int64_t nnz = 0;
  int64_t compact_nnz = 0;
  int64_t max_row_nnz = 0;
  int64_t tail_rows = 0;
};
HybridStats hybrid_stats(const HybridF32& hybrid);

}  // namespace twell
