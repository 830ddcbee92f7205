// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/byte_products.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/matmul/byte_products.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#ifndef TWELL_OPS_MATMUL_BYTE_PRODUCTS_ONCE_
#define TWELL_OPS_MATMUL_BYTE_PRODUCTS_ONCE_
namespace twell {
namespace {

using Bytes = Matrix<const int8_t>;

// The rows of A in integers.
struct QuantisedRows {
  Matrix<const int16_t> values;  // [M, K]
  const float* scales;           // [M] 1 / factor
};

// B is read at four far places at once, and lines this far ahead are prefetched: see row_products.
constexpr int64_t kPlaces = 4;
constexpr int64_t kAhead = 1024;  // bytes
constexpr int64_t kLine = 64;     // bytes

}  // namespace
}  // namespace twell
#endif

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// q = a * factor, rounded; returns the sum of |q|.
int64_t round_values(const float* a, int64_t k, float factor, int16_t* q) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const hn::Rebind<int16_t, decltype(d)> d16;
  const hn::CappedTag<float, 1> one;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kBlock = 8192;  // values whose sum fits into 32 bits
  int64_t total = 0;
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, k);
    auto sum = hn::Zero(d32);
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      const auto value = hn::NearestInt(hn::Mul(hn::LoadU(d, a + i), hn::Set(d, factor)));
      sum = hn::Add(sum, hn::Abs(value));
      hn::StoreU(hn::DemoteTo(d16, value), d16, q + i);
    }
    total += hn::GetLane(hn::SumOfLanes(d32, sum));
    for (; i < end; ++i) {
      const auto value = hn::NearestInt(hn::Mul(hn::Set(one, a[i]), hn::Set(one, factor)));
      q[i] = static_cast<int16_t>(hn::GetLane(value));
      total += hn::GetLane(hn::Abs(value));
    }
  }
  return total;
}

float quantise(const float* a, int64_t k, int16_t* q) {
  constexpr float kMost = 32767.0f, kLeastLargest = 1e-30f;
  constexpr int64_t kMostSum = std::numeric_limits<int32_t>::max() / 128;
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto most = hn::Zero(d), zeros = hn::Zero(d);  // zeros: 0 times each value, NaN where not finite
  int64_t i = 0;
  for (; i + lanes <= k; i += lanes) {
    const auto value = hn::LoadU(d, a + i);
    most = hn::Max(most, hn::Abs(value));
    zeros = hn::MulAdd(value, hn::Zero(d), zeros);
  }
  float largest = hn::GetLane(hn::MaxOfLanes(d, most));
  bool finite = hn::GetLane(hn::SumOfLanes(d, zeros)) == 0.0f;
  for (; i < k; ++i) {
    largest = std::max(largest, std::abs(a[i]));
    finite = finite && std::isfinite(a[i]);
  }
  if (!finite) {
    std::fill_n(q, k, int16_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  float factor = kMost / std::max(largest, kLeastLargest);
  const int64_t sum = round_values(a, k, factor, q);
  if (sum > kMostSum) {
    // The sum of |a| factor is at most sum + k / 2, and rounding adds another k / 2 at most.
    factor *= static_cast<float>(kMostSum - k) / static_cast<float>(sum + k);
    round_values(a, k, factor, q);
  }
  return 1.0f / factor;
}

// Without vectors: what the functions of the same names below compute.
#if HWY_TARGET == HWY_SCALAR

template <int kA>
void dots(const QuantisedRows& a, int64_t first, Bytes b, int64_t apart, MatrixF c) {
  for (int64_t row = first; row < first + kA; ++row) {
    for (int64_t col = 0; col < kPlaces * apart; col += apart) {
      int32_t total = 0;
      for (int64_t i = 0; i < b.cols; ++i) total += a.values(row, i) * b(col, i);
      c(row, col) = static_cast<float>(total) * a.scales[row];
    }
  }
}

void add_rows(const QuantisedRows& a, Bytes b, int64_t first, int64_t apart, Matrix<int32_t> sums) {
  for (int64_t row = 0; row < sums.rows; ++row) {
    for (int64_t i = first; i < first + kPlaces * apart; i += apart) {
      const int32_t scale = a.values(row, i);
      for (int64_t col = 0; col < sums.cols; ++col) sums(row, col) += scale * b(i, col);
    }
  }
}

#else

// kA rows of A from `first` on times rows 0, apart, 2 apart, ... of B, to the same columns of C.
template <int kA>
HWY_INLINE void dots(const QuantisedRows& a, int64_t first, Bytes b, int64_t apart, MatrixF c) {
  const hn::ScalableTag<int16_t> d16;
  const hn::RepartitionToWide<decltype(d16)> d32;
  const hn::Rebind<int8_t, decltype(d16)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d16));
  const int64_t k = b.cols;
  const int16_t* a_rows[kA];
  const int8_t* b_rows[kPlaces];
  hn::Vec<decltype(d32)> sums[kA][kPlaces], more[kA][kPlaces];
  for (int row = 0; row < kA; ++row) a_rows[row] = a.values.row(first + row);
  for (int col = 0; col < kPlaces; ++col) b_rows[col] = b.row(col * apart);
  for (int row = 0; row < kA; ++row) {
    for (int col = 0; col < kPlaces; ++col) sums[row][col] = more[row][col] = hn::Zero(d32);
  }
  const auto add = [&](int64_t i) HWY_ATTR {
    hn::Vec<decltype(d16)> values[kA];
    for (int row = 0; row < kA; ++row) values[row] = hn::LoadU(d16, a_rows[row] + i);
    for (int col = 0; col < kPlaces; ++col) {
      const auto weights = hn::PromoteTo(d16, hn::LoadU(d8, b_rows[col] + i));
      for (int row = 0; row < kA; ++row) {
        sums[row][col] = hn::ReorderWidenMulAccumulate(d32, values[row], weights, sums[row][col],
                                                       more[row][col]);
      }
    }
  };
  int64_t i = 0;
  for (; i + kLine <= k; i += kLine) {
    for (int col = 0; col < kPlaces; ++col) hwy::Prefetch(b_rows[col] + i + kAhead);
    for (int64_t j = i; j < i + kLine; j += lanes) add(j);
  }
  for (; i + lanes <= k; i += lanes) add(i);
  for (int row = 0; row < kA; ++row) {
    for (int col = 0; col < kPlaces; ++col) {
      int32_t total = hn::GetLane(hn::SumOfLanes(d32, hn::Add(sums[row][col], more[row][col])));
      for (int64_t j = i; j < k; ++j) total += a_rows[row][j] * b_rows[col][j];
      c(first + row, col * apart) = static_cast<float>(total) * a.scales[first + row];
    }
  }
}

// sums [M, N] += rows first, first + apart, ... of B, kPlaces of them, times their values of A.
// Bytes of two rows are interleaved, so that one instruction multiplies and adds both.
HWY_INLINE void add_rows(const QuantisedRows& a, Bytes b, int64_t first, int64_t apart,
                         Matrix<int32_t> sums) {
  // Vectors of two blocks of 16 bytes at most: half of one has a single block of bytes, which is
  // interleaved in the order of the columns.
  const hn::CappedTag<int16_t, 16> d16;
  const hn::RepartitionToWide<decltype(d16)> d32;
  const hn::Rebind<int8_t, decltype(d16)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d8)), half = lanes / 2;
  constexpr int kPairs = kPlaces / 2;
  const int8_t* rows[kPlaces];
  for (int i = 0; i < kPlaces; ++i) rows[i] = b.row(first + i * apart);
  const auto both = [&](int64_t row, int pair) {
    const auto even = static_cast<uint16_t>(a.values(row, first + 2 * pair * apart));
    const auto odd = static_cast<uint16_t>(a.values(row, first + (2 * pair + 1) * apart));
    return static_cast<int32_t>(uint32_t{even} | uint32_t{odd} << 16);
  };
  const auto add = [&](int64_t at) HWY_ATTR {
    hn::Vec<decltype(d16)> lower[kPairs], upper[kPairs];
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto even = hn::LoadU(d8, rows[2 * pair] + at);
      const auto odd = hn::LoadU(d8, rows[2 * pair + 1] + at);
      lower[pair] = hn::PromoteTo(d16, hn::InterleaveLower(d8, even, odd));
      upper[pair] = hn::PromoteTo(d16, hn::InterleaveUpper(d8, even, odd));
    }
    for (int64_t row = 0; row < sums.rows; ++row) {
      auto low = hn::Zero(d32), low_more = low, high = low, high_more = low;
      for (int pair = 0; pair < kPairs; ++pair) {
        const auto scale = hn::BitCast(d16, hn::Set(d32, both(row, pair)));
        low = hn::ReorderWidenMulAccumulate(d32, scale, lower[pair], low, low_more);
        high = hn::ReorderWidenMulAccumulate(d32, scale, upper[pair], high, high_more);
      }
      int32_t* const out = sums.row(row) + at;
      const auto add_to = [&](auto even, auto odd, int32_t* to) HWY_ATTR {
        const auto sum = hn::RearrangeToOddPlusEven(even, odd);
        hn::StoreU(hn::Add(hn::LoadU(d32, to), sum), d32, to);
      };
      add_to(low, low_more, out);
      add_to(high, high_more, out + half);
    }
  };
  int64_t at = 0;
  for (; at + kLine <= sums.cols; at += kLine) {
    for (int i = 0; i < kPlaces; ++i) hwy::Prefetch(rows[i] + at + kAhead);
    for (int64_t j = at; j < at + kLine; j += lanes) add(j);
  }
  for (; at + lanes <= sums.cols; at += lanes) add(at);
  for (; at < sums.cols; ++at) {
    for (int64_t row = 0; row < sums.rows; ++row) {
      for (int i = 0; i < kPlaces; ++i) {
        sums(row, at) += a.values(row, first + i * apart) * rows[i][at];
      }
    }
  }
}

#endif  // HWY_SCALAR

// Columns [begin, end) of C = A B^T: each quarter of them is one of the places where B is read.
void dot_columns(const QuantisedRows& a, Bytes b, MatrixF c, int64_t begin, int64_t end) {
  const int64_t step = (end - begin) / kPlaces;
  for (int64_t col = begin; col < begin + step; ++col) {
    const Bytes rows = b.slice_rows(col, (kPlaces - 1) * step + 1);
    const MatrixF out(c.data + col, c.rows, (kPlaces - 1) * step + 1, c.stride);
    int64_t row = 0;
    for (; row + 2 <= c.rows; row += 2) dots<2>(a, row, rows, step, out);
    if (row < c.rows) dots<1>(a, row, rows, step, out);
  }
  for (int64_t col = begin + kPlaces * step; col < end; ++col) {
    for (int64_t row = 0; row < c.rows; ++row) {
      int32_t total = 0;
      for (int64_t i = 0; i < b.cols; ++i) total += a.values(row, i) * b(col, i);
      c(row, col) = static_cast<float>(total) * a.scales[row];
    }
  }
}

// sums [M, N] += rows [begin, end) of B times their columns of A.
void sum_rows(const QuantisedRows& a, Bytes b, int64_t begin, int64_t end, Matrix<int32_t> sums) {
  const int64_t step = (end - begin) / kPlaces;
  for (int64_t i = begin; i < begin + step; ++i) add_rows(a, b, i, step, sums);
  for (int64_t i = begin + kPlaces * step; i < end; ++i) {
    for (int64_t row = 0; row < sums.rows; ++row) {
      const int32_t scale = a.values(row, i);
      for (int64_t col = 0; col < sums.cols; ++col) sums(row, col) += scale * b(i, col);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(quantise);
HWY_EXPORT(dot_columns);
HWY_EXPORT(sum_rows);

namespace {

constexpr int64_t kWorthAThread = int64_t{1} << 17;  // multiply-adds: some ten microseconds

// Calls fn(begin, end, thread) on ranges of [0, n), thread < threads <= ctx.threads(). Threads take
// them as they become free, each half of its share of what is left, `grain` items at least: memory
// serves two cores unevenly, and with fixed shares one waits for the other. Which thread has which
// range must not matter to the result.
template <typename Fn>
void share(Context& ctx, int64_t n, int64_t grain, int64_t threads, const Fn& fn) {
  std::atomic<int64_t> next = 0;
  ctx.parallel_for(threads, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t part = first; part < last; ++part) {
      for (int64_t begin = next; begin < n;) {
        const int64_t end = std::min(n, begin + std::max(grain, (n - begin) / (2 * threads)));
        if (!next.compare_exchange_weak(begin, end)) continue;
        fn(begin, end, part);
        begin = next;
      }
    }
  });
}

QuantisedRows quantised(Arena::Scope& scope, ConstMatrixF a) {
  const auto values = scope.matrix<int16_t>(a.rows, a.cols);
  float* const scales = scope.alloc<float>(a.rows);
  for (int64_t row = 0; row < a.rows; ++row) {
    scales[row] = quantise_activations(a.row(row), a.cols, values.row(row));
  }
  return {values, scales};
}

Bytes bytes_of(const WeightMatrix& b) {
  return {reinterpret_cast<const int8_t*>(b.data), b.rows, b.cols, b.stride};
}

}  // namespace

float quantise_activations(const float* a, int64_t k, int16_t* q) {
  return HWY_DYNAMIC_DISPATCH(quantise)(a, k, q);
}

void byte_row_products(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c) {
  Arena::Scope scope(ctx.scratch());
  const QuantisedRows rows = quantised(scope, a);
  const int64_t groups = (c.cols + 3) / 4;
  const int64_t grain = kWorthAThread / (4 * a.cols * a.rows) + 1;
  const int64_t threads = std::clamp<int64_t>(groups / grain, 1, ctx.threads());
  share(ctx, groups, grain, threads, [&](int64_t begin, int64_t end, int64_t) {
    HWY_DYNAMIC_DISPATCH(dot_columns)
    (rows, bytes_of(b), c, begin * 4, std::min(end * 4, c.cols));
  });
}

// Rows of bytes are short, and a thread's columns of them shorter: threads share the rows instead
// and add their sums up at the end.
void byte_row_sums(Context& ctx, ConstMatrixF a, const WeightMatrix& b, MatrixF c) {
  Arena::Scope scope(ctx.scratch());
  const QuantisedRows rows = quantised(scope, a);
  const int64_t parts =
      std::clamp<int64_t>(b.rows / (kWorthAThread / (c.cols * c.rows) + 1), 1, ctx.threads());
  const auto sums = scope.matrix<int32_t>(parts * c.rows, c.cols);
  std::fill_n(sums.data, sums.rows * sums.cols, 0);
  const int64_t rows_at_least = b.rows / parts / 8 / kPlaces * kPlaces + kPlaces;
  share(ctx, b.rows, rows_at_least, parts, [&](int64_t begin, int64_t end, int64_t part) {
    HWY_DYNAMIC_DISPATCH(sum_rows)
    (rows, bytes_of(b), begin, end, sums.slice_rows(part * c.rows, c.rows));
  });
  const int64_t grain = kWorthAThread / (parts * c.rows) + 1;  // columns
  ctx.parallel_for(c.cols, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = 0; row < c.rows; ++row) {
      int32_t* const total = sums.row(row);
      for (int64_t part = 1; part < parts; ++part) {
        const int32_t* const sum = sums.row(part * c.rows + row);
        for (int64_t col = begin; col < end; ++col) total[col] += sum[col];
      }
      for (int64_t col = begin; col < end; ++col) {
        c(row, col) = static_cast<float>(total[col]) * rows.scales[row];
      }
    }
  });
}

}  // namespace twell
#endif  // HWY_ONCE
