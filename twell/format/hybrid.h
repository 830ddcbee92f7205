// SPDX-License-Identifier: Apache-2.0
// Hybrid: the sparse activation format of training. A matrix [M, F] is split by rows. A row with at
// most W non-zeros is compact: row m of an ELL part [M, W] holds its columns, ascending, and its
// values, in entries 0 .. row_nnz[m] - 1 (entries past that are unspecified). A heavier row goes
// whole, zeros included, into a dense tail [tail_capacity, F]. Heavy rows take tail rows in order.
//
//   row_nnz    [M] int32     non-zeros of each row, tail rows too
//   tail_slot  [M] int32     -1: compact; else the row of the tail
//   index      [M, W] Index  columns
//   value      [M, W] Value
//   tail       [tail_capacity, F] Value
//
// Words: float + uint32 (the CPU), and the published bf16 + uint16 with W = 128 and a tail of M / 8
// rows, for F up to 65,536.
//
// Overflow. Rows beyond the tail's capacity have no place, and no part of such a matrix may be
// used: packing says so, and the producer stays dense. Nothing is dropped or cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "twell/base/dtype.h"
#include "twell/base/matrix.h"

namespace twell {

struct HybridShape {
  int64_t rows = 0;           // M
  int64_t cols = 0;           // F
  int64_t ell_width = 0;      // W
  int64_t tail_capacity = 0;  // rows

  static constexpr int64_t kPublishedWidth = 128;
  static HybridShape published(int64_t rows, int64_t cols) {
    return {rows, cols, kPublishedWidth, rows / 8};
  }
};

// Views of the arrays; the memory is the caller's.
template <typename Value, typename Index>
struct Hybrid {
  HybridShape shape;
  int64_t tail_rows = 0;  // in use
  int32_t* row_nnz = nullptr;
  int32_t* tail_slot = nullptr;
  Matrix<Index> index;  // [M, W]
  Matrix<Value> value;  // [M, W]
  Matrix<Value> tail;   // [tail_capacity, F]

  bool is_compact(int64_t row) const { return tail_slot[row] < 0; }
};
using HybridF32 = Hybrid<float, uint32_t>;
using HybridBF16 = Hybrid<BF16, uint16_t>;

// Why Index cannot hold this shape; empty when it can.
template <typename Index>
std::string hybrid_unsupported(const HybridShape& shape);

// Bytes of all arrays, each aligned to kAlignment; value_planes counts the arrays of values that
// share one pattern (training keeps gate and up).
template <typename Value, typename Index>
int64_t hybrid_bytes(const HybridShape& shape, int64_t value_planes = 1);

// The executable specification of the layout. False when the heavy rows exceed the tail, and then
// only row_nnz is defined. A value that the word type rounds to zero is a zero.
template <typename Value, typename Index>
[[nodiscard]] bool pack_hybrid(ConstMatrixF dense, Hybrid<Value, Index>& hybrid);
// dense [M, F] is written whole.
template <typename Value, typename Index>
void unpack_hybrid(const Hybrid<Value, Index>& hybrid, MatrixF dense);

struct HybridStats {
  int64_t nnz = 0;
  int64_t compact_nnz = 0;
  int64_t max_row_nnz = 0;
  int64_t tail_rows = 0;
};
template <typename Value, typename Index>
HybridStats hybrid_stats(const Hybrid<Value, Index>& hybrid);

}  // namespace twell
