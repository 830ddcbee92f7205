// SPDX-License-Identifier: Apache-2.0
#include "twell/format/statistics.h"

#include <algorithm>
#include <numeric>

#include "twell/base/error.h"

namespace twell {

Pattern pattern_from_lists(int64_t cols, std::span<const uint16_t> row_nnz,
                           std::span<const uint16_t> column) {
  Pattern out;
  out.cols = cols;
  out.row_begin.push_back(0);
  for (const uint16_t nnz : row_nnz) out.row_begin.push_back(out.row_begin.back() + nnz);
  TWELL_REQUIRE(out.row_begin.back() == std::ssize(column),
                "an activation pattern lists {} active neurons, its rows claim {}", column.size(),
                out.row_begin.back());
  out.column.assign(column.begin(), column.end());
  for (int64_t m = 0; m < out.rows(); ++m) {
    const auto row = out.row(m);
    for (size_t i = 0; i < row.size(); ++i) {
      TWELL_REQUIRE(row[i] < cols && (i == 0 || row[i - 1] < row[i]),
                    "an activation pattern must list ascending neurons below {}; row {} has {}",
                    cols, m, row[i]);
    }
  }
  return out;
}

Pattern pattern_from_csr(const Csr& in) {
  Pattern out;
  out.cols = in.cols;
  out.row_begin.assign(in.row_begin, in.row_begin + in.rows + 1);
  out.column.assign(in.column, in.column + in.nnz());
  return out;
}

template <typename Word>
Pattern pattern_from_twell(const Twell<Word>& in) {
  Pattern out;
  out.cols = in.shape.cols;
  out.row_begin.push_back(0);
  for (int64_t row = 0; row < in.shape.rows; ++row) {
    twell_for_each(in, row, [&](int64_t column, float) {
      out.column.push_back(static_cast<uint32_t>(column));
    });
    std::sort(out.column.begin() + out.row_begin.back(), out.column.end());
    out.row_begin.push_back(std::ssize(out.column));
  }
  return out;
}
template Pattern pattern_from_twell<uint32_t>(const Twell<uint32_t>&);
template Pattern pattern_from_twell<uint64_t>(const Twell<uint64_t>&);

void append_rows(const Pattern& from, Pattern& to) {
  TWELL_CHECK(from.cols == to.cols && !to.row_begin.empty(), "rows of {} columns behind rows of {}",
              from.cols, to.cols);
  const int64_t before = to.row_begin.back();
  for (int64_t m = 0; m < from.rows(); ++m) {
    to.row_begin.push_back(before + from.row_begin[static_cast<size_t>(m) + 1]);
  }
  to.column.insert(to.column.end(), from.column.begin(), from.column.end());
}

Pattern slice_rows(const Pattern& in, int64_t begin, int64_t count) {
  TWELL_CHECK(begin >= 0 && count >= 0 && begin + count <= in.rows(), "rows {} to {} of {}", begin,
              begin + count, in.rows());
  Pattern out{.cols = in.cols, .row_begin = {0}, .column = {}};
  for (int64_t m = begin; m < begin + count; ++m) {
    const std::span<const uint32_t> row = in.row(m);
    out.column.insert(out.column.end(), row.begin(), row.end());
    out.row_begin.push_back(std::ssize(out.column));
  }
  return out;
}

RowStatistics row_statistics(const Pattern& pattern) {
  const int64_t rows = pattern.rows();
  if (rows == 0) return {};
  std::vector<int64_t> nnz;
  for (int64_t m = 0; m < rows; ++m) nnz.push_back(std::ssize(pattern.row(m)));
  std::sort(nnz.begin(), nnz.end());
  return {static_cast<double>(pattern.column.size()) / static_cast<double>(rows),
          nnz[static_cast<size_t>(rows / 2)], nnz[static_cast<size_t>(rows * 99 / 100)],
          nnz.back()};
}

std::vector<int64_t> tile_histogram(const Pattern& pattern, int64_t tile) {
  TWELL_CHECK(tile > 0, "a tile must have columns, got {}", tile);
  std::vector<int64_t> histogram(static_cast<size_t>(tile) + 1, 0);
  const int64_t tiles = (pattern.cols + tile - 1) / tile;
  for (int64_t m = 0; m < pattern.rows(); ++m) {
    int64_t occupied = 0;
    const auto row = pattern.row(m);
    for (size_t i = 0; i < row.size();) {
      const size_t begin = i;
      const int64_t t = row[i] / tile;
      while (i < row.size() && row[i] / tile == t) ++i;
      ++histogram[i - begin];
      ++occupied;
    }
    histogram[0] += tiles - occupied;
  }
  return histogram;
}

int64_t overflowing_tiles(const Pattern& pattern, int64_t tile, int64_t compression) {
  const std::vector<int64_t> histogram = tile_histogram(pattern, tile);
  return std::accumulate(histogram.begin() + tile / compression, histogram.end(), int64_t{0});
}

namespace {

// Of every tile of rows, the last of which may have fewer.
std::vector<int64_t> tile_unions(const Pattern& pattern, int64_t tokens) {
  TWELL_CHECK(tokens > 0, "a union needs at least one token, got {}", tokens);
  std::vector<int64_t> sizes(static_cast<size_t>((pattern.rows() + tokens - 1) / tokens), 0);
  std::vector<int64_t> last_tile(static_cast<size_t>(pattern.cols), -1);
  for (int64_t m = 0; m < pattern.rows(); ++m) {
    const int64_t tile = m / tokens;
    for (const uint32_t column : pattern.row(m)) {
      sizes[static_cast<size_t>(tile)] += last_tile[column] != tile;
      last_tile[column] = tile;
    }
  }
  return sizes;
}

}  // namespace

std::vector<int64_t> union_sizes(const Pattern& pattern, int64_t tokens) {
  std::vector<int64_t> sizes = tile_unions(pattern, tokens);
  sizes.resize(static_cast<size_t>(pattern.rows() / tokens));
  return sizes;
}

double mean_union(const Pattern& pattern, int64_t tokens) {
  const std::vector<int64_t> sizes = tile_unions(pattern, tokens);
  if (sizes.empty()) return 0.0;
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  return static_cast<double>(total) / static_cast<double>(sizes.size());
}

std::vector<int64_t> column_counts(const Pattern& pattern) {
  std::vector<int64_t> counts(static_cast<size_t>(pattern.cols), 0);
  for (const uint32_t column : pattern.column) ++counts[column];
  return counts;
}

int64_t dead_columns(const Pattern& pattern) {
  const std::vector<int64_t> counts = column_counts(pattern);
  return std::count(counts.begin(), counts.end(), 0);
}

}  // namespace twell
