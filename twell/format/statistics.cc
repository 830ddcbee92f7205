// SPDX-License-Identifier: Apache-2.0
#include "twell/format/statistics.h"

#include <algorithm>
#include <numeric>

#include "twell/base/error.h"

namespace twell {

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

namespace {

// Sizes of the unions of all tiles of rows; the last tile may have fewer rows.
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

}  // namespace twell
