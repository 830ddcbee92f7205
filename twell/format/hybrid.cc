// SPDX-License-Identifier: Apache-2.0
#include "twell/format/hybrid.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "twell/base/buffer.h"
#include "twell/base/error.h"

namespace twell {
namespace {

float widen(float value) { return value; }
float widen(BF16 value) { return to_float(value); }

template <typename Value>
Value narrow(float value);
template <>
float narrow<float>(float value) {
  return value;
}
template <>
BF16 narrow<BF16>(float value) {
  return to_bf16(value);
}

template <typename Value>
int32_t count_nonzeros(const float* row, int64_t cols) {
  return static_cast<int32_t>(
      std::count_if(row, row + cols, [](float v) { return widen(narrow<Value>(v)) != 0.0f; }));
}

int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlign = static_cast<int64_t>(kAlignment);
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

template <typename Index>
std::string hybrid_unsupported(const HybridShape& shape) {
  // An unsigned column index; the row maps and counts are int32.
  constexpr int64_t kMaxCols = int64_t{std::numeric_limits<Index>::max()} + 1;
  constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
  if (shape.rows < 0 || shape.cols < 0 || shape.ell_width < 0 || shape.tail_capacity < 0) {
    return fmt::format("negative size: rows {}, columns {}, width {}, tail {}", shape.rows,
                       shape.cols, shape.ell_width, shape.tail_capacity);
  }
  if (shape.cols > std::min(kMaxCols, kMaxCount)) {
    return fmt::format("{} columns exceed the {} of this index", shape.cols,
                       std::min(kMaxCols, kMaxCount));
  }
  if (shape.rows > kMaxCount) return fmt::format("{} rows exceed {}", shape.rows, kMaxCount);
  return {};
}

template <typename Value, typename Index>
int64_t hybrid_bytes(const HybridShape& shape, int64_t value_planes) {
  const int64_t ell = shape.rows * shape.ell_width;
  const int64_t tail = shape.tail_capacity * shape.cols;
  const int64_t value = static_cast<int64_t>(sizeof(Value));
  return 2 * aligned(shape.rows * static_cast<int64_t>(sizeof(int32_t))) +
         aligned(ell * static_cast<int64_t>(sizeof(Index))) +
         value_planes * (aligned(ell * value) + aligned(tail * value));
}

template <typename Value, typename Index>
bool pack_hybrid(ConstMatrixF dense, Hybrid<Value, Index>& hybrid) {
  const HybridShape& shape = hybrid.shape;
  TWELL_CHECK(dense.rows == shape.rows && dense.cols == shape.cols,
              "a [{}, {}] matrix does not fit a hybrid of [{}, {}]", dense.rows, dense.cols,
              shape.rows, shape.cols);
  const std::string unsupported = hybrid_unsupported<Index>(shape);
  TWELL_CHECK(unsupported.empty(), "hybrid: {}", unsupported);
  int64_t heavy = 0;
  for (int64_t m = 0; m < shape.rows; ++m) {
    hybrid.row_nnz[m] = count_nonzeros<Value>(dense.row(m), shape.cols);
    if (hybrid.row_nnz[m] > shape.ell_width) ++heavy;
  }
  if (heavy > shape.tail_capacity) return false;

  hybrid.tail_rows = 0;
  for (int64_t m = 0; m < shape.rows; ++m) {
    const float* const row = dense.row(m);
    if (hybrid.row_nnz[m] > shape.ell_width) {
      hybrid.tail_slot[m] = static_cast<int32_t>(hybrid.tail_rows);
      std::transform(row, row + shape.cols, hybrid.tail.row(hybrid.tail_rows), narrow<Value>);
      ++hybrid.tail_rows;
      continue;
    }
    hybrid.tail_slot[m] = -1;
    int64_t entry = 0;
    for (int64_t f = 0; f < shape.cols; ++f) {
      const Value value = narrow<Value>(row[f]);
      if (widen(value) == 0.0f) continue;
      hybrid.index(m, entry) = static_cast<Index>(f);
      hybrid.value(m, entry) = value;
      ++entry;
    }
  }
  return true;
}

template <typename Value, typename Index>
void unpack_hybrid(const Hybrid<Value, Index>& hybrid, MatrixF dense) {
  const HybridShape& shape = hybrid.shape;
  TWELL_CHECK(dense.rows == shape.rows && dense.cols == shape.cols,
              "a hybrid of [{}, {}] does not unpack to [{}, {}]", shape.rows, shape.cols,
              dense.rows, dense.cols);
  for (int64_t m = 0; m < shape.rows; ++m) {
    float* const row = dense.row(m);
    if (!hybrid.is_compact(m)) {
      const Value* const source = hybrid.tail.row(hybrid.tail_slot[m]);
      std::transform(source, source + shape.cols, row, [](Value v) { return widen(v); });
      continue;
    }
    std::fill_n(row, shape.cols, 0.0f);
    for (int64_t entry = 0; entry < hybrid.row_nnz[m]; ++entry) {
      row[hybrid.index(m, entry)] = widen(hybrid.value(m, entry));
    }
  }
}

template <typename Value, typename Index>
HybridStats hybrid_stats(const Hybrid<Value, Index>& hybrid) {
  HybridStats stats = {.tail_rows = hybrid.tail_rows};
  for (int64_t m = 0; m < hybrid.shape.rows; ++m) {
    const int64_t nnz = hybrid.row_nnz[m];
    stats.nnz += nnz;
    if (hybrid.is_compact(m)) stats.compact_nnz += nnz;
    stats.max_row_nnz = std::max(stats.max_row_nnz, nnz);
  }
  return stats;
}

template std::string hybrid_unsupported<uint16_t>(const HybridShape&);
template std::string hybrid_unsupported<uint32_t>(const HybridShape&);
template int64_t hybrid_bytes<float, uint32_t>(const HybridShape&, int64_t);
template int64_t hybrid_bytes<BF16, uint16_t>(const HybridShape&, int64_t);
template bool pack_hybrid(ConstMatrixF, HybridF32&);
template bool pack_hybrid(ConstMatrixF, HybridBF16&);
template void unpack_hybrid(const HybridF32&, MatrixF);
template void unpack_hybrid(const HybridBF16&, MatrixF);
template HybridStats hybrid_stats(const HybridF32&);
template HybridStats hybrid_stats(const HybridBF16&);

}  // namespace twell
