// SPDX-License-Identifier: Apache-2.0
// How the hybrid execution shares its work: equal non-zeros for the threads, heavy rows apart.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/format/hybrid.h"

namespace twell {

// Tokens whose compact rows are worked on at a time: bounds the scratch memory, and is the table of
// tokens that the weight gradients read in slices.
inline constexpr int64_t kHybridSpan = 2048;

// Cumulative work of rows [first, first + count), [count + 1]: compact non-zeros, and one for
// looking at a row at all.
const int64_t* row_work(Arena::Scope& scope, const HybridF32& hybrid, int64_t first, int64_t count);

// Tokens of the tail rows, in tail order [tail_rows].
const int32_t* tail_tokens(Arena::Scope& scope, const HybridF32& hybrid);

// Calls fn(m, columns, n) for the compact rows of [begin, end) that have entries.
template <typename Fn>
void for_each_entry_list(const HybridF32& hybrid, int64_t begin, int64_t end, const Fn& fn) {
  for (int64_t m = begin; m < end; ++m) {
    const int64_t n = hybrid.row_nnz[m];
    if (hybrid.is_compact(m) && n > 0) fn(m, hybrid.index.row(m), n);
  }
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

// Gathered tail rows are rounded up to this many, so that their GEMMs come in few shapes.
inline int64_t tail_granularity(int64_t tail_capacity) {
  return std::min<int64_t>(32, tail_capacity);
}
inline int64_t padded_tail(int64_t rows, int64_t tail_capacity) {
  const int64_t granularity = tail_granularity(tail_capacity);
  return (rows + granularity - 1) / granularity * granularity;
}

}  // namespace twell
