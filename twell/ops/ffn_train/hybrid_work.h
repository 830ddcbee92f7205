// SPDX-License-Identifier: Apache-2.0
// How the hybrid execution cuts its work: by equal non-zeros for the threads, by cache for the
// tables, and by column for the weight gradients.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/format/hybrid.h"

namespace twell {

// The compact part by column: entries offset[j] .. offset[j + 1] - 1 are neuron j's, in ascending
// tokens.
struct TransposedEntry {
  uint32_t token;
  uint32_t slot;  // entry `slot` of the token's compact row
};
struct TransposedPattern {
  const int64_t* offset = nullptr;           // [F + 1]
  const TransposedEntry* entries = nullptr;  // [compact nnz]
};
TransposedPattern transpose_pattern(Context& ctx, Arena::Scope& scope, const HybridF32& hybrid);

// Cumulative work of the rows [M + 1]: compact non-zeros, and one for looking at a row at all.
const int64_t* row_work(Arena::Scope& scope, const HybridF32& hybrid);

// Tokens of the tail rows, in tail order [tail_rows].
const int32_t* tail_tokens(Arena::Scope& scope, const HybridF32& hybrid);

// The position of row m's first entry, from `first` on, whose column is not below `column`.
inline int64_t entries_below(const HybridF32& hybrid, int64_t m, int64_t first, int64_t column) {
  const uint32_t* const row = hybrid.index.row(m);
  return std::lower_bound(row + first, row + hybrid.row_nnz[m], column) - row;
}

// Copies of rows[tokens[0]], rows[tokens[1]], ... [padded, cols]; rows past count are zero.
MatrixF gather_rows(Context& ctx, Arena::Scope& scope, ConstMatrixF rows, const int32_t* tokens,
                    int64_t count, int64_t padded);
// out[tokens[i]] = rows[i], i < count
void scatter_rows(Context& ctx, ConstMatrixF rows, const int32_t* tokens, int64_t count,
                  MatrixF out);

// Calls fn(begin, end, thread) on ranges of [0, n) of about equal work; work_before [n + 1] is
// cumulative from 0.
template <typename Fn>
void parallel_balanced(Context& ctx, const int64_t* work_before, int64_t n, const Fn& fn) {
  const int64_t parts = ctx.threads();
  const auto bound = [&](int64_t part) {
    if (part == parts) return n;
    const int64_t target = work_before[n] / parts * part;
    return std::lower_bound(work_before, work_before + n, target) - work_before;
  };
  ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int thread) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = part == 0 ? 0 : bound(part);
      if (begin < bound(part + 1)) fn(begin, bound(part + 1), thread);
    }
  });
}

// Rows of `tables` tables [*, width] that stay together in a core's second-level cache.
inline int64_t cached_rows(int64_t width, int64_t tables) {
  constexpr int64_t kBytes = 768 * 1024;  // of the 1-2 MiB a server core has
  return std::max<int64_t>(16, kBytes / (width * tables * static_cast<int64_t>(sizeof(float))));
}

// Gathered tail rows are rounded up to this many, so that their GEMMs come in few shapes.
inline int64_t tail_granularity(int64_t tail_capacity) {
  return std::min<int64_t>(32, tail_capacity);
}
inline int64_t padded_tail(int64_t rows, int64_t tail_capacity) {
  const int64_t granularity = tail_granularity(tail_capacity);
  return (rows + granularity - 1) / granularity * granularity;
}

}  // namespace twell
