// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/hybrid_work.h"

namespace twell {
namespace {

// Calls fn(token, row's columns, count) for the compact rows of [begin, end).
template <typename Fn>
void for_each_compact_row(const HybridF32& hybrid, int64_t begin, int64_t end, const Fn& fn) {
  for (int64_t m = begin; m < end; ++m) {
    if (hybrid.is_compact(m)) fn(m, hybrid.index.row(m), hybrid.row_nnz[m]);
  }
}

}  // namespace

// A counting sort. Each part of the tokens has its own counts, then its own places, so that the
// order is that of the tokens for any number of parts.
TransposedPattern transpose_pattern(Context& ctx, Arena::Scope& scope, const HybridF32& hybrid) {
  const int64_t tokens = hybrid.shape.rows;
  const int64_t ffn = hybrid.shape.cols;
  const int64_t parts = ctx.threads();
  int64_t* const offset = scope.alloc<int64_t>(ffn + 1);
  const Matrix<int64_t> place = scope.matrix<int64_t>(parts, ffn);
  const auto over_parts = [&](const auto& fn) {
    ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t p = first; p < last; ++p) fn(p, tokens * p / parts, tokens * (p + 1) / parts);
    });
  };

  over_parts([&](int64_t part, int64_t begin, int64_t end) {
    int64_t* const count = place.row(part);
    std::fill_n(count, ffn, 0);
    for_each_compact_row(hybrid, begin, end, [&](int64_t, const uint32_t* columns, int32_t n) {
      for (int32_t i = 0; i < n; ++i) ++count[columns[i]];
    });
  });
  int64_t total = 0;
  for (int64_t j = 0; j < ffn; ++j) {
    offset[j] = total;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t count = place(part, j);
      place(part, j) = total;
      total += count;
    }
  }
  offset[ffn] = total;

  TransposedEntry* const entries = scope.alloc<TransposedEntry>(total);
  over_parts([&](int64_t part, int64_t begin, int64_t end) {
    int64_t* const next = place.row(part);
    for_each_compact_row(hybrid, begin, end, [&](int64_t m, const uint32_t* columns, int32_t n) {
      for (int32_t i = 0; i < n; ++i) {
        entries[next[columns[i]]++] = {static_cast<uint32_t>(m), static_cast<uint32_t>(i)};
      }
    });
  });
  return {offset, entries};
}

const int64_t* row_work(Arena::Scope& scope, const HybridF32& hybrid) {
  const int64_t tokens = hybrid.shape.rows;
  int64_t* const work = scope.alloc<int64_t>(tokens + 1);
  work[0] = 0;
  for (int64_t m = 0; m < tokens; ++m) {
    work[m + 1] = work[m] + 1 + (hybrid.is_compact(m) ? hybrid.row_nnz[m] : 0);
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
