// SPDX-License-Identifier: Apache-2.0
// How threads share the pairs of a problem: contiguous rows with about equal numbers of non-zeros.
// It affects speed only, not results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twell/base/context.h"
#include "twell/format/csr.h"

namespace twell {

// A row costs at least as much as this many pairs, for clearing and writing y and reading the list.
inline constexpr int64_t kRowCost = 2;

// First row of share `part` of `parts`.
inline int64_t split_rows(const Csr& pairs, int64_t part, int64_t parts) {
  const auto cost_before = [&](int64_t row) { return pairs.row_begin[row] + row * kRowCost; };
  const int64_t target = cost_before(pairs.rows) * part / parts;
  int64_t low = 0;
  int64_t high = pairs.rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost_before(middle) < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls fn(begin, end, part) on shares of the rows, in parallel; parts <= ctx.threads().
template <typename Fn>
void parallel_over_rows(Context& ctx, const Csr& pairs, const Fn& fn) {
  const int64_t parts = std::min<int64_t>(ctx.threads(), pairs.rows);
  ctx.parallel_for(parts, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = split_rows(pairs, part, parts);
      const int64_t end = split_rows(pairs, part + 1, parts);
      if (begin < end) fn(begin, end, part);
    }
  });
}

}  // namespace twell
