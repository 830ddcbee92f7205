// SPDX-License-Identifier: Apache-2.0
// Compressed sparse rows: the non-zeros of a row are contiguous, however many there are. CPU code
// works on this form, because fixed-size tiles gain it nothing.
#pragma once

#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/format/twell.h"

namespace twell {

// Row m holds entries [row_begin[m], row_begin[m + 1]), columns ascending.
struct Csr {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t* row_begin = nullptr;  // [rows + 1]
  uint32_t* column = nullptr;    // [nnz]
  float* value = nullptr;        // [nnz]

  int64_t nnz() const { return row_begin[rows]; }
  int64_t row_nnz(int64_t row) const { return row_begin[row + 1] - row_begin[row]; }
};

// Allocated in the scope's scratch memory. `in` must have row_nnz and ascending columns.
Csr csr_from_twell(Context& ctx, Arena::Scope& scope, const TwellWide& in);

}  // namespace twell
