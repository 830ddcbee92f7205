// SPDX-License-Identifier: Apache-2.0
// ELL (ELLPACK): every row has room for W non-zeros. The compact form of rows that are known to be
// light; conversions in both directions are the executable specification.
//
// Shape [M, W] of column and value, row-major. row_nnz[m] is the true number of non-zeros of row m,
// even beyond W: that is how an overflowing row is seen. The entries of a row that fits are stored
// in ascending columns; entries past row_nnz are unspecified. Of a row that does not fit nothing is
// stored, since half a row is of no use: it goes whole to `tail`, where tail[i] names the row whose
// F dense values are at tail_values[i * F]. Tail rows ascend. M tail rows always suffice.
#pragma once

#include <cstdint>

#include "twell/base/matrix.h"
#include "twell/format/twell.h"

namespace twell {

struct Ell {
  int64_t rows = 0;              // M
  int64_t cols = 0;              // F
  int64_t width = 0;             // W
  uint32_t* column = nullptr;    // [M, W]
  float* value = nullptr;        // [M, W]
  int32_t* row_nnz = nullptr;    // [M]
  int32_t* tail = nullptr;       // [tail_capacity]
  float* tail_values = nullptr;  // [tail_capacity, F]
  int64_t tail_capacity = 0;
  int64_t tail_rows = 0;  // in use

  bool fits(int64_t row) const { return row_nnz[row] <= width; }
};

// Fills out.column, value, row_nnz, tail, tail_values and tail_rows. Elements that compare unequal
// to 0 are kept. Error when shapes disagree or the tail is too small.
void ell_pack_reference(ConstMatrixF dense, Ell& out);
void ell_unpack_reference(const Ell& in, MatrixF dense);

// The same, from and to TwELL. A TwELL being written takes its spill slots as twell_pack_reference
// does, and needs ascending columns when it is read.
template <typename Word>
void ell_from_twell(const Twell<Word>& in, Ell& out);
template <typename Word>
void twell_from_ell(const Ell& in, const Twell<Word>& out);

}  // namespace twell
