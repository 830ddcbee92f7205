// SPDX-License-Identifier: Apache-2.0
#include "twell/format/hybrid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/rng.h"

namespace twell {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct HybridStorage {
  explicit HybridStorage(const HybridShape& s)
      : row_nnz(size(s.rows), -7),
        tail_slot(size(s.rows), -7),
        index(size(s.rows * s.ell_width), 0xfff),
        value(size(s.rows * s.ell_width)),
        tail(size(s.tail_capacity * s.cols)) {
    view = {.shape = s,
            .row_nnz = row_nnz.data(),
            .tail_slot = tail_slot.data(),
            .index = {index.data(), s.rows, s.ell_width},
            .value = {value.data(), s.rows, s.ell_width},
            .tail = {tail.data(), s.tail_capacity, s.cols}};
  }
  static size_t size(int64_t n) { return static_cast<size_t>(n); }

  std::vector<int32_t> row_nnz, tail_slot;
  std::vector<uint32_t> index;
  std::vector<float> value, tail;
  HybridF32 view;
};

// Row m has nnz[m] non-zeros at spread-out columns.
std::vector<float> sparse_matrix(const std::vector<int64_t>& nnz, int64_t cols) {
  std::vector<float> dense(nnz.size() * static_cast<size_t>(cols));
  for (size_t m = 0; m < nnz.size(); ++m) {
    const int64_t start = static_cast<int64_t>(m) * 17;
    for (int64_t i = 0; i < nnz[m]; ++i) {
      const int64_t column = (start + i * cols / std::max<int64_t>(nnz[m], 1)) % cols;
      dense[m * static_cast<size_t>(cols) + static_cast<size_t>(column)] =
          static_cast<float>((i % 100) + 1) * (i % 2 == 0 ? 0.5f : -0.25f);
    }
  }
  return dense;
}

void expect_round_trip(const std::vector<int64_t>& nnz, const HybridShape& shape) {
  const std::vector<float> dense = sparse_matrix(nnz, shape.cols);
  HybridStorage storage(shape);
  HybridF32& hybrid = storage.view;
  ASSERT_TRUE(pack_hybrid(ConstMatrixF(dense.data(), shape.rows, shape.cols), hybrid));
  int64_t heavy = 0, compact_nnz = 0;
  for (int64_t m = 0; m < shape.rows; ++m) {
    const int64_t count = nnz[static_cast<size_t>(m)];
    EXPECT_EQ(hybrid.row_nnz[m], count);
    EXPECT_EQ(hybrid.tail_slot[m], count > shape.ell_width ? heavy++ : -1);
    if (count > shape.ell_width) continue;
    compact_nnz += count;
    for (int64_t i = 1; i < count; ++i) EXPECT_LT(hybrid.index(m, i - 1), hybrid.index(m, i));
  }
  std::vector<float> restored(dense.size(), kNan);
  unpack_hybrid(hybrid, {restored.data(), shape.rows, shape.cols});
  EXPECT_EQ(restored, dense);

  const HybridStats stats = hybrid_stats(hybrid);
  EXPECT_EQ(stats.nnz, std::accumulate(nnz.begin(), nnz.end(), int64_t{0}));
  EXPECT_EQ(stats.compact_nnz, compact_nnz);
  EXPECT_EQ(stats.max_row_nnz, *std::max_element(nnz.begin(), nnz.end()));
  EXPECT_EQ(stats.tail_rows, heavy);
}

TEST(Hybrid, RowsAroundTheWidth) {
  const std::vector<int64_t> nnz = {0, 1, 7, 8, 9, 100, 8, 0, 50, 9};
  const HybridShape shape = {10, 100, 8, 4};
  expect_round_trip(nnz, shape);
}

TEST(Hybrid, AllEmptyAllFullAndOneRow) {
  expect_round_trip({0, 0, 0}, {3, 40, 4, 0});
  expect_round_trip({40, 40, 40}, {3, 40, 4, 3});
  expect_round_trip({40}, {1, 40, 40, 0});
  expect_round_trip({3}, {1, 40, 0, 1});
}

TEST(Hybrid, ColumnsBeyond65536) {
  const HybridShape shape = {2, 70001, 64, 1};
  expect_round_trip({60, 70001}, shape);
  EXPECT_EQ(hybrid_unsupported(shape), "");
  EXPECT_NE(hybrid_unsupported({2, int64_t{1} << 31, 64, 1}), "");
  EXPECT_NE(hybrid_unsupported({2, 64, -1, 1}), "");
}

TEST(Hybrid, RefusesMoreHeavyRowsThanTheTailHolds) {
  const std::vector<float> dense = sparse_matrix({5, 20, 20, 20}, 20);
  HybridStorage storage({4, 20, 5, 2});
  EXPECT_FALSE(pack_hybrid(ConstMatrixF(dense.data(), 4, 20), storage.view));
  EXPECT_EQ(storage.row_nnz, (std::vector<int32_t>{5, 20, 20, 20}));
}

TEST(Hybrid, KeepsNanAndSubnormalNumbers) {
  const std::vector<float> dense = {0.0f, kNan, -0.0f, 1e-45f, 2.0f};
  HybridStorage exact({1, 5, 5, 0});
  ASSERT_TRUE(pack_hybrid(ConstMatrixF(dense.data(), 1, 5), exact.view));
  EXPECT_EQ(exact.row_nnz[0], 3);
  EXPECT_TRUE(std::isnan(exact.value[0]));
}

TEST(Hybrid, BytesCountEveryArray) {
  // 2 maps of 64 int32, index and planes of [64, 16], tail planes of [2, 32].
  const HybridShape shape = {64, 32, 16, 2};
  EXPECT_EQ(hybrid_bytes(shape, 1), 2 * 256 + 4096 + 4096 + 256);
  EXPECT_EQ(hybrid_bytes(shape, 2), 2 * 256 + 4096 + 2 * (4096 + 256));
}

}  // namespace
}  // namespace twell
