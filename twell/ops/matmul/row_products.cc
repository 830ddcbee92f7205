// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/row_products.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/matmul/row_products.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "twell/format/weight_load-inl.h"
// clang-format on

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

// total + a * the widened value, with one rounding: compilers fuse the two for some dtypes only.
template <typename T>
HWY_INLINE float multiply_add_one(float a, const T* value, float total) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(hn::MulAdd(hn::Set(d, a), load_weights(d, value), hn::Set(d, total)));
}

// Reading four far places of B at once, each from front to back, lets the hardware's prefetchers
// follow, which four neighbouring rows, shorter than a page, do not: with bytes and rows of 2 KiB
// memory gives twice as much. Lines this far ahead are prefetched in addition.
constexpr int64_t kAheadBytes = 1024;
constexpr int64_t kLine = 64;  // bytes

// Rows 0, b_step, 2 b_step, ... of B, to the same columns of C.
template <int kA, typename T>
HWY_INLINE void products(ConstMatrixF a, Matrix<const T> b, int64_t b_step, MatrixF c, float beta) {
  const Tag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t k = a.cols;
  const T* b_rows[kRowsB];
  for (int col = 0; col < kRowsB; ++col) b_rows[col] = b.row(col * b_step);
  Vec sums[kA][kRowsB];
  for (int row = 0; row < kA; ++row) {
    for (int col = 0; col < kRowsB; ++col) sums[row][col] = hn::Zero(d);
  }
  const auto add = [&](int64_t i) HWY_ATTR {
    Vec values[kRowsB];
    for (int col = 0; col < kRowsB; ++col) values[col] = load_weights(d, b_rows[col] + i);
    for (int row = 0; row < kA; ++row) {
      const Vec u = hn::LoadU(d, a.row(row) + i);
      for (int col = 0; col < kRowsB; ++col) {
        sums[row][col] = hn::MulAdd(u, values[col], sums[row][col]);
      }
    }
  };
  constexpr int64_t kLineValues = kLine / static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  for (; i + kLineValues <= k; i += kLineValues) {
    for (int col = 0; col < kRowsB; ++col) {
      hwy::Prefetch(reinterpret_cast<const std::byte*>(b_rows[col] + i) + kAheadBytes);
    }
    for (int64_t j = i; j < i + kLineValues; j += lanes) add(j);
  }
  for (; i + lanes <= k; i += lanes) add(i);
  for (int row = 0; row < kA; ++row) {
    for (int col = 0; col < kRowsB; ++col) {
      float total = hn::GetLane(hn::SumOfLanes(d, sums[row][col]));
      for (int64_t j = i; j < k; ++j) total = multiply_add_one(a(row, j), b_rows[col] + j, total);
      float& out = c(row, col * b_step);
      out = beta == 0.0f ? total : multiply_add_one(beta, &out, total);
    }
  }
}

// Computes one product at a time, for the last rows of B.
template <typename T>
HWY_INLINE void single_product(ConstMatrixF a, Matrix<const T> b, MatrixF c, float beta,
                               int64_t row, int64_t col) {
  const Tag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  Vec sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= a.cols; i += lanes) {
    sum = hn::MulAdd(hn::LoadU(d, a.row(row) + i), load_weights(d, b.row(col) + i), sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < a.cols; ++i) total = multiply_add_one(a(row, i), b.row(col) + i, total);
  c(row, col) = beta == 0.0f ? total : multiply_add_one(beta, &c(row, col), total);
}

// Columns [begin, end) of C = A B^T: each quarter of them is one of the places where B is read.
template <typename T>
void product_columns(ConstMatrixF a, Matrix<const T> b, MatrixF c, float beta, int64_t begin,
                     int64_t end) {
  const int64_t step = (end - begin) / kRowsB;
  for (int64_t col = begin; col < begin + step; ++col) {
    for (int64_t row = 0; row < a.rows; row += kRowsA) {
      const int64_t rows = std::min(kRowsA, a.rows - row);
      const ConstMatrixF a_rows = a.slice_rows(row, rows);
      const Matrix<const T> b_rows = b.slice_rows(col, (kRowsB - 1) * step + 1);
      const MatrixF out(c.row(row) + col, rows, (kRowsB - 1) * step + 1, c.stride);
      if (rows == 1) products<1>(a_rows, b_rows, step, out, beta);
      if (rows == 2) products<2>(a_rows, b_rows, step, out, beta);
      if (rows == 3) products<3>(a_rows, b_rows, step, out, beta);
      if (rows == 4) products<4>(a_rows, b_rows, step, out, beta);
    }
  }
  for (int64_t col = begin + kRowsB * step; col < end; ++col) {
    for (int64_t row = 0; row < a.rows; ++row) single_product(a, b, c, beta, row, col);
  }
}

// c[begin, end) += the sum of kRows rows of B from `first` on, times their values of A, for each
// row of C. Rows further on are prefetched: with a thread's columns of B only a part of each row is
// read, which the hardware does not predict.
template <int kRows, typename T>
HWY_INLINE void add_rows(ConstMatrixF a, Matrix<const T> b, MatrixF c, int64_t first, int64_t begin,
                         int64_t end) {
  constexpr int64_t kAhead = 8;  // rows
  const Tag d;
  const hn::CappedTag<float, 1> one;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* rows[kRows];
  const T* next[kRows];
  for (int i = 0; i < kRows; ++i) {
    rows[i] = b.row(first + i);
    next[i] = b.row(std::min(first + i + kAhead, b.rows - 1));
  }
  int64_t at = begin;
  for (; at + lanes <= end; at += lanes) {
    Vec values[kRows];
    for (int i = 0; i < kRows; ++i) {
      values[i] = load_weights(d, rows[i] + at);
      hwy::Prefetch(next[i] + at);
    }
    for (int64_t row = 0; row < a.rows; ++row) {
      const float* scale = a.row(row) + first;
      Vec sum = hn::LoadU(d, c.row(row) + at);
      for (int i = 0; i < kRows; ++i) sum = hn::MulAdd(hn::Set(d, scale[i]), values[i], sum);
      hn::StoreU(sum, d, c.row(row) + at);
    }
  }
  for (; at < end; ++at) {
    for (int64_t row = 0; row < a.rows; ++row) {
      const float* scale = a.row(row) + first;
      auto sum = hn::LoadU(one, c.row(row) + at);
      for (int i = 0; i < kRows; ++i) {
        sum = hn::MulAdd(hn::Set(one, scale[i]), load_weights(one, rows[i] + at), sum);
      }
      hn::StoreU(sum, one, c.row(row) + at);
    }
  }
}

// Columns [begin, end) of C = A B.
template <typename T>
void sum_columns(ConstMatrixF a, Matrix<const T> b, MatrixF c, float beta, int64_t begin,
                 int64_t end) {
  for (int64_t row = 0; row < a.rows; ++row) {
    float* out = c.row(row);
    for (int64_t col = begin; col < end; ++col) out[col] = beta == 0.0f ? 0.0f : beta * out[col];
  }
  int64_t first = 0;
  for (; first + 4 <= b.rows; first += 4) add_rows<4>(a, b, c, first, begin, end);
  for (; first < b.rows; ++first) add_rows<1>(a, b, c, first, begin, end);
}

template <typename T>
Matrix<const T> typed(const WeightMatrix& b) {
  return {reinterpret_cast<const T*>(b.data), b.rows, b.cols, b.stride};
}

}  // namespace

// The two for B of floats of any dtype: columns [begin, end) of C.
void products_of(ConstMatrixF a, const WeightMatrix& b, MatrixF c, float beta, int64_t begin,
                 int64_t end) {
  with_weight_type(b.dtype, [&]<typename T>(const T*) {
    if constexpr (!std::is_same_v<T, I8>) {
      product_columns<T>(a, typed<T>(b), c, beta, begin, end);
    }
  });
}
void sums_of(ConstMatrixF a, const WeightMatrix& b, MatrixF c, float beta, int64_t begin,
             int64_t end) {
  with_weight_type(b.dtype, [&]<typename T>(const T*) {
    if constexpr (!std::is_same_v<T, I8>) sum_columns<T>(a, typed<T>(b), c, beta, begin, end);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(products_of);
HWY_EXPORT(sums_of);

namespace {

constexpr int64_t kWorthAThread = int64_t{1} << 16;  // multiply-adds: some ten microseconds

}  // namespace

void row_products(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c, float beta) {
  const int64_t groups = (c.cols + 3) / 4;
  const int64_t grain = kWorthAThread / (4 * a.cols * a.rows) + 1;
  ctx.parallel_for(groups, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(products_of)(a, b, c, beta, begin * 4, std::min(end * 4, c.cols));
  });
}

void row_sums(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c, float beta) {
  constexpr int64_t kColumns = 128;  // four lines of bf16, and a multiple of every vector
  const int64_t groups = (c.cols + kColumns - 1) / kColumns;
  const int64_t grain = kWorthAThread / (kColumns * a.cols * a.rows) + 1;
  ctx.parallel_for(groups, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(sums_of)
    (a, b, c, beta, begin * kColumns, std::min(end * kColumns, c.cols));
  });
}

}  // namespace twell
#endif  // HWY_ONCE
