// SPDX-License-Identifier: Apache-2.0
// Another order of rows, for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "twell/base/rng.h"

namespace twell {

// The row of each of so many tokens: a random permutation.
inline std::vector<int32_t> shuffled_rows(int64_t tokens) {
  std::vector<int32_t> rows(static_cast<size_t>(tokens));
  std::iota(rows.begin(), rows.end(), 0);
  for (size_t i = rows.size(); i > 1; --i) {
    std::swap(rows[i - 1], rows[uniform_below(7, 0, i, i)]);
  }
  return rows;
}

// Rows of `width` values, each moved from its token's place to its row.
template <typename T>
std::vector<T> moved_to(const std::vector<int32_t>& rows, const std::vector<T>& values,
                        int64_t width) {
  std::vector<T> moved(values.size());
  for (size_t token = 0; token < rows.size(); ++token) {
    const auto from = values.begin() + static_cast<int64_t>(token) * width;
    std::copy_n(from, width, moved.begin() + rows[token] * width);
  }
  return moved;
}

}  // namespace twell
