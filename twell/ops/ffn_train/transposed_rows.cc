// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/transposed_rows.h"

#include <algorithm>

namespace twell {
namespace {

// Calls fn(m) for the compact rows among the span's tokens [begin, end).
template <typename Fn>
void for_each_compact_row(const CompactSpan& span, int64_t begin, int64_t end, const Fn& fn) {
  for (int64_t m = span.first + begin; m < span.first + end; ++m) {
    if (span.saved.hybrid.is_compact(m)) fn(m);
  }
}

// Counting sort of one block: tokens [begin, end) of the span, whose entries start at `base`.
// place [F] is working memory.
void transpose_block(const CompactSpan& span, int64_t begin, int64_t end, int64_t base,
                     int64_t* offset, int64_t* place, const TransposedRows& out) {
  const HybridF32& hybrid = span.saved.hybrid;
  std::fill_n(place, out.ffn, 0);
  for_each_compact_row(span, begin, end, [&](int64_t m) {
    const uint32_t* const neuron = hybrid.index.row(m);
    for (int32_t i = 0; i < hybrid.row_nnz[m]; ++i) ++place[neuron[i]];
  });
  offset[0] = base;
  for (int64_t j = 0; j < out.ffn; ++j) {
    offset[j + 1] = offset[j] + place[j];
    place[j] = offset[j];
  }
  for_each_compact_row(span, begin, end, [&](int64_t m) {
    const uint32_t* const neuron = hybrid.index.row(m);
    const float* const g = hybrid.value.row(m);
    const float* const d_h = span.d_h.row(m - span.first);
    const float* const u = span.saved.gated() ? span.saved.up.row(m) : nullptr;
    for (int32_t i = 0; i < hybrid.row_nnz[m]; ++i) {
      const int64_t at = place[neuron[i]]++;
      out.token[at] = static_cast<uint32_t>(m);
      if (u != nullptr) {
        out.d_gate[at] = d_h[i] * u[i];
        out.d_up[at] = d_h[i] * g[i];
        out.h[at] = g[i] * u[i];
      } else {
        out.d_up[at] = d_h[i];
        out.h[at] = g[i];
      }
    }
  });
}

}  // namespace

int64_t CompactSpan::nnz() const {
  int64_t sum = 0;
  for_each_compact_row(*this, 0, count, [&](int64_t m) { sum += saved.hybrid.row_nnz[m]; });
  return sum;
}

TransposedRows transpose_rows(Context& ctx, Arena::Scope& scope, const CompactSpan& span,
                              int64_t tokens_per_block) {
  const int64_t nnz = span.nnz();
  const int64_t ffn = span.saved.ffn();
  const int64_t blocks = (span.count + tokens_per_block - 1) / tokens_per_block;
  TransposedRows out = {.ffn = ffn,
                        .blocks = blocks,
                        .offset = scope.alloc<int64_t>(blocks * (ffn + 1)),
                        .token = scope.alloc<uint32_t>(nnz),
                        .d_gate = span.saved.gated() ? scope.alloc<float>(nnz) : nullptr,
                        .d_up = scope.alloc<float>(nnz),
                        .h = scope.alloc<float>(nnz)};
  Arena::Scope temporary(ctx.scratch());
  const Matrix<int64_t> place = temporary.matrix<int64_t>(ctx.threads(), ffn);
  int64_t* const base = temporary.alloc<int64_t>(blocks);
  const auto block_end = [&](int64_t b) {
    return std::min(span.count, (b + 1) * tokens_per_block);
  };
  int64_t total = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    base[b] = total;
    for_each_compact_row(span, b * tokens_per_block, block_end(b),
                         [&](int64_t m) { total += span.saved.hybrid.row_nnz[m]; });
  }
  ctx.parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t b = begin; b < end; ++b) {
      transpose_block(span, b * tokens_per_block, block_end(b), base[b], out.offset + b * (ffn + 1),
                      place.row(thread), out);
    }
  });
  return out;
}

const int64_t* neuron_work(Arena::Scope& scope, const TransposedRows& rows) {
  int64_t* const work = scope.alloc<int64_t>(rows.ffn + 1);
  std::fill_n(work, rows.ffn + 1, 0);
  for (int64_t b = 0; b < rows.blocks; ++b) {
    for (int64_t j = 0; j < rows.ffn; ++j) {
      work[j + 1] += rows.begin(b, j + 1) - rows.begin(b, j);
    }
  }
  for (int64_t j = 0; j < rows.ffn; ++j) work[j + 1] += work[j];
  return work;
}

}  // namespace twell
