// SPDX-License-Identifier: Apache-2.0
#include "twell/format/csr.h"

#include "twell/base/error.h"

namespace twell {

Csr csr_from_twell(Context& ctx, Arena::Scope& scope, const TwellWide& in) {
  TWELL_CHECK(in.row_nnz != nullptr, "a TwELL without row_nnz cannot be listed by rows");
  Csr out;
  out.rows = in.shape.rows;
  out.cols = in.shape.cols;
  out.row_begin = scope.alloc<int64_t>(out.rows + 1);
  out.row_begin[0] = 0;
  for (int64_t row = 0; row < out.rows; ++row) {
    out.row_begin[row + 1] = out.row_begin[row] + in.row_nnz[row];
  }
  out.column = scope.alloc<uint32_t>(out.nnz());
  out.value = scope.alloc<float>(out.nnz());
  ctx.parallel_for(out.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t at = out.row_begin[row];
      twell_for_each(in, row, [&](int64_t column, float value) {
        out.column[at] = static_cast<uint32_t>(column);
        out.value[at++] = value;
      });
      TWELL_CHECK(at == out.row_begin[row + 1], "TwELL row {} holds {} non-zeros, row_nnz says {}",
                  row, at - out.row_begin[row], in.row_nnz[row]);
    }
  });
  return out;
}

}  // namespace twell
