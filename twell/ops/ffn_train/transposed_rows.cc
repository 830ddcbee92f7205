// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/transposed_rows.h"

#include <algorithm>

#include "twell/ops/ffn_train/hybrid_work.h"

namespace twell {
namespace {

// Puts the entries of tokens [begin, end) at their places; place [F] moves on.
void place_entries(const HybridF32& hybrid, const CompactSpan& span, int64_t begin, int64_t end,
                   int64_t* place, const TransposedRows& out) {
  for_each_entry_list(hybrid, begin, end, [&](int64_t m, const uint32_t* neuron, int64_t n) {
    const int64_t r = m - span.first;
    const float* const d_gate = out.d_gate == nullptr ? nullptr : span.d_gate.row(r);
    const float* const d_up = span.d_up.row(r);
    const float* const h = span.h.row(r);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = place[neuron[i]]++;
      out.token[at] = static_cast<uint32_t>(r);
      if (d_gate != nullptr) out.d_gate[at] = d_gate[i];
      out.d_up[at] = d_up[i];
      out.h[at] = h[i];
    }
  });
}

}  // namespace

// A counting sort. Each part of the tokens has its own counts, then its own places, so that the
// order is that of the tokens for any number of parts.
TransposedRows transpose_rows(Context& ctx, Arena::Scope& scope, const HybridF32& hybrid,
                              const CompactSpan& span) {
  const int64_t ffn = hybrid.shape.cols;
  const int64_t parts = ctx.threads();
  const auto over_parts = [&](const auto& fn) {
    ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t p = first; p < last; ++p) {
        fn(p, span.first + span.count * p / parts, span.first + span.count * (p + 1) / parts);
      }
    });
  };
  TransposedRows out = {.offset = scope.alloc<int64_t>(ffn + 1)};
  const Matrix<int64_t> place = scope.matrix<int64_t>(parts, ffn);
  over_parts([&](int64_t part, int64_t begin, int64_t end) {
    int64_t* const count = place.row(part);
    std::fill_n(count, ffn, 0);
    for_each_entry_list(hybrid, begin, end, [&](int64_t, const uint32_t* neuron, int64_t n) {
      for (int64_t i = 0; i < n; ++i) ++count[neuron[i]];
    });
  });
  int64_t total = 0;
  for (int64_t j = 0; j < ffn; ++j) {
    out.offset[j] = total;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t count = place(part, j);
      place(part, j) = total;
      total += count;
    }
  }
  out.offset[ffn] = total;
  out.token = scope.alloc<uint32_t>(total);
  out.d_gate = !span.d_gate.empty() ? scope.alloc<float>(total) : nullptr;
  out.d_up = scope.alloc<float>(total);
  out.h = scope.alloc<float>(total);
  over_parts([&](int64_t part, int64_t begin, int64_t end) {
    place_entries(hybrid, span, begin, end, place.row(part), out);
  });
  return out;
}

}  // namespace twell
