// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/hybrid_work.h"

namespace twell {
const int64_t* row_work(Arena::Scope& scope, const HybridF32& hybrid, int64_t first,
                        int64_t count) {
  int64_t* const work = scope.alloc<int64_t>(count + 1);
  work[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t m = first + i;
    work[i + 1] = work[i] + 1 + (hybrid.is_compact(m) ? hybrid.row_nnz[m] : 0);
  }
  return work;
}

const int32_t* tail_tokens(Arena::Scope& scope, const HybridF32& hybrid) {
  int32_t* const tokens = scope.alloc<int32_t>(hybrid.tail_rows);
  for (int64_t m = 0; m < hybrid.shape.rows; ++m) {
    if (!hybrid.is_compact(m)) tokens[hybrid.tail_slot[m]] = static_cast<int32_t>(m);
  }
  return tokens;
}

MatrixF gather_rows(Context& ctx, Arena::Scope& scope, ConstMatrixF rows, const int32_t* tokens,
                    int64_t count, int64_t padded) {
  const MatrixF out = scope.matrix<float>(padded, rows.cols);
  ctx.parallel_for(padded, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (i < count) {
        std::copy_n(rows.row(tokens[i]), rows.cols, out.row(i));
      } else {
        std::fill_n(out.row(i), rows.cols, 0.0f);
      }
    }
  });
  return out;
}

void scatter_rows(Context& ctx, ConstMatrixF rows, const int32_t* tokens, int64_t count,
                  MatrixF out) {
  ctx.parallel_for(count, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      std::copy_n(rows.row(i), rows.cols, out.row(tokens[i]));
    }
  });
}

}  // namespace twell
