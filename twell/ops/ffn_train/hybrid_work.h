// SPDX-License-Identifier: Apache-2.0
// How the hybrid execution cuts its work: by equal non-zeros for the threads, and by cache for the
// tables.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twell/base/buffer.h"
#include "twell/base/context.h"
#include "twell/format/hybrid.h"

namespace twell {

// Rows of `tables` tables [*, width] that stay together in a core's second-level cache.
inline int64_t cached_rows(int64_t width, int64_t tables) {
  constexpr int64_t kBytes = 768 * 1024;  // of the 1-2 MiB a server core has
  return std::max<int64_t>(16, kBytes / (width * tables * static_cast<int64_t>(sizeof(float))));
}

// Cumulative work of rows [first, first + count), [count + 1]: compact non-zeros, and one for
// looking at a row at all.
const int64_t* row_work(Arena::Scope& scope, const HybridF32& hybrid, int64_t first, int64_t count);

// Tokens of the tail rows, in tail order [tail_rows].
const int32_t* tail_tokens(Arena::Scope& scope, const HybridF32& hybrid);

// The position of row m's first entry, from `first` on, whose column is not below `column`. A few
// steps at a time: a linear search.
inline int32_t entries_below(const HybridF32& hybrid, int64_t m, int32_t first, int64_t column) {
  const uint32_t* const row = hybrid.index.row(m);
  int32_t i = first;
  while (i < hybrid.row_nnz[m] && row[i] < column) ++i;
  return i;
}

// Calls fn(m, first, n) so that every entry of the compact rows of [begin, end) is visited once:
// entries [first, first + n) of row m. Rows come in tiles, and within a tile the neurons in blocks
// whose rows of `tables` weight tables [F, width] stay in cache while the tile's rows pass.
template <typename Fn>
void for_each_cached_run(const HybridF32& hybrid, int64_t width, int64_t tables, int64_t begin,
                         int64_t end, const Fn& fn) {
  constexpr int64_t kTile = 128;  // with its rows of two token matrices, as large as the block
  const int64_t block = cached_rows(width, tables);
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t count = std::min(kTile, end - tile);
    int32_t next[kTile] = {};
    for (int64_t block_end = block; block_end - block < hybrid.shape.cols; block_end += block) {
      for (int64_t r = 0; r < count; ++r) {
        const int64_t m = tile + r;
        if (!hybrid.is_compact(m)) continue;
        const int32_t last = entries_below(hybrid, m, next[r], block_end);
        if (last > next[r]) fn(m, next[r], last - next[r]);
        next[r] = last;
      }
    }
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
