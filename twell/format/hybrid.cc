// SPDX-License-Identifier: Apache-2.0
#include "twell/format/hybrid.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "twell/base/buffer.h"
#include "twell/base/error.h"

namespace twell {
namespace {

int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlign = static_cast<int64_t>(kAlignment);
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

std::string hybrid_unsupported(const HybridShape& shape) {
  constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();  // of maps and counts
  if (shape.rows < 0 || shape.cols < 0 || shape.ell_width < 0 || shape.tail_capacity < 0) {
    return fmt::format("negative size: rows {}, columns {}, width {}, tail {}", shape.rows,
                       shape.cols, shape.ell_width, shape.tail_capacity);
  }
  if (shape.cols > kMaxCount) return fmt::format("{} columns exceed {}", shape.cols, kMaxCount);
  if (shape.rows > kMaxCount) return fmt::format("{} rows exceed {}", shape.rows, kMaxCount);
  return {};
}

int64_t hybrid_bytes(const HybridShape& shape, int64_t value_planes) {
  const int64_t ell = shape.rows * shape.ell_width;
  const int64_t tail = shape.tail_capacity * shape.cols;
  const int64_t value = int64_t{sizeof(float)};
  return 2 * aligned(shape.rows * int64_t{sizeof(int32_t)}) +
         aligned(ell * int64_t{sizeof(uint32_t)}) +
         value_planes * (aligned(ell * value) + aligned(tail * value));
}

bool pack_hybrid(ConstMatrixF dense, HybridF32& hybrid) {
  const HybridShape& shape = hybrid.shape;
  TWELL_CHECK(dense.rows == shape.rows && dense.cols == shape.cols,
              "a [{}, {}] matrix does not fit a hybrid of [{}, {}]", dense.rows, dense.cols,
              shape.rows, shape.cols);
  const std::string unsupported = hybrid_unsupported(shape);
  TWELL_CHECK(unsupported.empty(), "hybrid: {}", unsupported);
  int64_t heavy = 0;
  for (int64_t m = 0; m < shape.rows; ++m) {
    const float* const row = dense.row(m);
    hybrid.row_nnz[m] = static_cast<int32_t>(
        std::count_if(row, row + shape.cols, [](float v) { return v != 0.0f; }));
    if (hybrid.row_nnz[m] > shape.ell_width) ++heavy;
  }
  if (heavy > shape.tail_capacity) return false;

  hybrid.tail_rows = 0;
  for (int64_t m = 0; m < shape.rows; ++m) {
    const float* const row = dense.row(m);
    if (hybrid.row_nnz[m] > shape.ell_width) {
      hybrid.tail_slot[m] = static_cast<int32_t>(hybrid.tail_rows);
      std::copy_n(row, shape.cols, hybrid.tail.row(hybrid.tail_rows));
      ++hybrid.tail_rows;
      continue;
    }
    hybrid.tail_slot[m] = -1;
    int64_t entry = 0;
    for (int64_t f = 0; f < shape.cols; ++f) {
      if (row[f] == 0.0f) continue;
      hybrid.index(m, entry) = static_cast<uint32_t>(f);
      hybrid.value(m, entry) = row[f];
      ++entry;
    }
  }
  return true;
}

void unpack_hybrid(const HybridF32& hybrid, MatrixF dense) {
  const HybridShape& shape = hybrid.shape;
  TWELL_CHECK(dense.rows == shape.rows && dense.cols == shape.cols,
              "a hybrid of [{}, {}] does not unpack to [{}, {}]", shape.rows, shape.cols,
              dense.rows, dense.cols);
  for (int64_t m = 0; m < shape.rows; ++m) {
    float* const row = dense.row(m);
    if (!hybrid.is_compact(m)) {
      std::copy_n(hybrid.tail.row(hybrid.tail_slot[m]), shape.cols, row);
      continue;
    }
    std::fill_n(row, shape.cols, 0.0f);
    for (int64_t entry = 0; entry < hybrid.row_nnz[m]; ++entry) {
      row[hybrid.index(m, entry)] = hybrid.value(m, entry);
    }
  }
}

HybridStats hybrid_stats(const HybridF32& hybrid) {
  HybridStats stats = {.tail_rows = hybrid.tail_rows};
  for (int64_t m = 0; m < hybrid.shape.rows; ++m) {
    const int64_t nnz = hybrid.row_nnz[m];
    stats.nnz += nnz;
    if (hybrid.is_compact(m)) stats.compact_nnz += nnz;
    stats.max_row_nnz = std::max(stats.max_row_nnz, nnz);
  }
  return stats;
}

}  // namespace twell
