// SPDX-License-Identifier: Apache-2.0
// An activation pattern, as a list of active columns per row, and how much neighbouring tokens
// share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/format/twell.h"

namespace twell {

// Row m has active columns column[row_begin[m] .. row_begin[m + 1]), ascending, each below cols.
struct Pattern {
  int64_t cols = 0;                // F
  std::vector<int64_t> row_begin;  // [M + 1]
  std::vector<uint32_t> column;    // [nnz]

  int64_t rows() const { return std::ssize(row_begin) - 1; }
  std::span<const uint32_t> row(int64_t m) const {
    const auto begin = static_cast<size_t>(row_begin[static_cast<size_t>(m)]);
    const auto end = static_cast<size_t>(row_begin[static_cast<size_t>(m) + 1]);
    return std::span(column).subspan(begin, end - begin);
  }
};

// Accepts any order within a tile.
template <typename Word>
Pattern pattern_from_twell(const Twell<Word>& in);
// Appends the rows of `from` to `to`, which has the same cols and at least row_begin {0}.
void append_rows(const Pattern& from, Pattern& to);
Pattern slice_rows(const Pattern& in, int64_t begin, int64_t count);

// Number of different columns active in each whole tile of `tokens` consecutive rows.
std::vector<int64_t> union_sizes(const Pattern& pattern, int64_t tokens);
// Mean size of the unions of all tiles, including a shorter last one.
double mean_union(const Pattern& pattern, int64_t tokens);

}  // namespace twell
