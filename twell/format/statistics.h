// SPDX-License-Identifier: Apache-2.0
// What an activation pattern looks like to the executions: how many non-zeros, how uneven, how much
// neighbouring tokens share, which neurons never fire. Works on a list of active columns per row,
// which is what every format and every captured pattern comes down to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/format/csr.h"

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

// From the two arrays of a captured layer (row_nnz [M], column [sum of row_nnz]), from TwELL, from
// CSR. InputError when the counts and columns of a captured layer contradict each other or F.
Pattern pattern_from_lists(int64_t cols, std::span<const uint16_t> row_nnz,
                           std::span<const uint16_t> column);
Pattern pattern_from_csr(const Csr& in);
template <typename Word>
Pattern pattern_from_twell(const Twell<Word>& in);
// The rows of `from` behind those of `to`, which has as many columns and row_begin {0} at least.
void append_rows(const Pattern& from, Pattern& to);
Pattern slice_rows(const Pattern& in, int64_t begin, int64_t count);

struct RowStatistics {
  double mean = 0.0;
  int64_t median = 0;
  int64_t p99 = 0;
  int64_t max = 0;
};
RowStatistics row_statistics(const Pattern& pattern);

// [tile + 1]: number of (row, tile) pairs with each non-zero count, for column tiles of `tile`.
std::vector<int64_t> tile_histogram(const Pattern& pattern, int64_t tile);
// (row, tile) pairs that overflow a TwELL of this shape's tile and compression.
int64_t overflowing_tiles(const Pattern& pattern, int64_t tile, int64_t compression);

// Number of different columns active in each whole tile of `tokens` consecutive rows.
std::vector<int64_t> union_sizes(const Pattern& pattern, int64_t tokens);
// Their mean, a last tile that is not whole counting as one.
double mean_union(const Pattern& pattern, int64_t tokens);

// [F] rows in which each column is active; a dead neuron has 0.
std::vector<int64_t> column_counts(const Pattern& pattern);
int64_t dead_columns(const Pattern& pattern);

}  // namespace twell
