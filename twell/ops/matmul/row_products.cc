// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/row_products.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/matmul/row_products.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;

// 4 x 4 sums, 4 rows of B and one of A take 21 of AVX-512's 32 registers. Four rows of B also hide
// the latency of the multiply-adds when A has a single row.
constexpr int64_t kRowsA = 4;
constexpr int64_t kRowsB = 4;

template <int kA>
HWY_INLINE void products(ConstMatrixF a, ConstMatrixF b, MatrixF c, float beta) {
  const Tag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t k = a.cols;
  Vec s00 = hn::Zero(d), s01 = s00, s02 = s00, s03 = s00;
  Vec s10 = s00, s11 = s00, s12 = s00, s13 = s00;
  Vec s20 = s00, s21 = s00, s22 = s00, s23 = s00;
  Vec s30 = s00, s31 = s00, s32 = s00, s33 = s00;
  const float* b0 = b.row(0);
  const float* b1 = b.row(1);
  const float* b2 = b.row(2);
  const float* b3 = b.row(3);
  int64_t i = 0;
  for (; i + lanes <= k; i += lanes) {
    const Vec v0 = hn::LoadU(d, b0 + i), v1 = hn::LoadU(d, b1 + i);
    const Vec v2 = hn::LoadU(d, b2 + i), v3 = hn::LoadU(d, b3 + i);
    const auto multiply = [&](int64_t row, Vec& x0, Vec& x1, Vec& x2, Vec& x3) HWY_ATTR {
      const Vec u = hn::LoadU(d, a.row(row) + i);
      x0 = hn::MulAdd(u, v0, x0);
      x1 = hn::MulAdd(u, v1, x1);
      x2 = hn::MulAdd(u, v2, x2);
      x3 = hn::MulAdd(u, v3, x3);
    };
    multiply(0, s00, s01, s02, s03);
    if constexpr (kA > 1) multiply(1, s10, s11, s12, s13);
    if constexpr (kA > 2) multiply(2, s20, s21, s22, s23);
    if constexpr (kA > 3) multiply(3, s30, s31, s32, s33);
  }
  const auto store = [&](int64_t row, int64_t col, Vec sum) HWY_ATTR {
    float total = hn::GetLane(hn::SumOfLanes(d, sum));
    for (int64_t j = i; j < k; ++j) total += a(row, j) * b(col, j);
    c(row, col) = beta == 0.0f ? total : beta * c(row, col) + total;
  };
  const auto store_row = [&](int64_t row, Vec x0, Vec x1, Vec x2, Vec x3) HWY_ATTR {
    store(row, 0, x0);
    store(row, 1, x1);
    store(row, 2, x2);
    store(row, 3, x3);
  };
  store_row(0, s00, s01, s02, s03);
  if constexpr (kA > 1) store_row(1, s10, s11, s12, s13);
  if constexpr (kA > 2) store_row(2, s20, s21, s22, s23);
  if constexpr (kA > 3) store_row(3, s30, s31, s32, s33);
}

// Computes one product at a time, for the last rows of B.
HWY_INLINE void single_product(ConstMatrixF a, ConstMatrixF b, MatrixF c, float beta, int64_t row,
                               int64_t col) {
  const Tag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  Vec sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= a.cols; i += lanes) {
    sum = hn::MulAdd(hn::LoadU(d, a.row(row) + i), hn::LoadU(d, b.row(col) + i), sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < a.cols; ++i) total += a(row, i) * b(col, i);
  c(row, col) = beta == 0.0f ? total : beta * c(row, col) + total;
}

}  // namespace

// Columns [begin, end) of C.
void product_columns(ConstMatrixF a, ConstMatrixF b, MatrixF c, float beta, int64_t begin,
                     int64_t end) {
  int64_t col = begin;
  for (; col + kRowsB <= end; col += kRowsB) {
    for (int64_t row = 0; row < a.rows; row += kRowsA) {
      const int64_t rows = std::min(kRowsA, a.rows - row);
      const ConstMatrixF a_rows = a.slice_rows(row, rows), b_rows = b.slice_rows(col, kRowsB);
      const MatrixF out(c.row(row) + col, rows, kRowsB, c.stride);
      if (rows == 1) products<1>(a_rows, b_rows, out, beta);
      if (rows == 2) products<2>(a_rows, b_rows, out, beta);
      if (rows == 3) products<3>(a_rows, b_rows, out, beta);
      if (rows == 4) products<4>(a_rows, b_rows, out, beta);
    }
  }
  for (; col < end; ++col) {
    for (int64_t row = 0; row < a.rows; ++row) single_product(a, b, c, beta, row, col);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(product_columns);

void row_products(Context& ctx, ConstMatrixF a, ConstMatrixF b, MatrixF c, float beta) {
  // Waking a thread pays off from about 64 Ki multiply-adds on (some ten microseconds).
  const int64_t groups = (c.cols + 3) / 4;
  const int64_t grain = (int64_t{1} << 16) / (4 * a.cols * a.rows) + 1;
  ctx.parallel_for(groups, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(product_columns)(a, b, c, beta, begin * 4, std::min(end * 4, c.cols));
  });
}

}  // namespace twell
#endif  // HWY_ONCE
