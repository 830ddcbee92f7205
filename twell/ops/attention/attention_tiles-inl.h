// SPDX-License-Identifier: Apache-2.0
// The vector kernels under attention, once per instruction set: small products of row-major tiles,
// packing, exponentials of score rows.
#if defined(TWELL_OPS_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWELL_OPS_ATTENTION_TILES_INL_H_
#undef TWELL_OPS_ATTENTION_TILES_INL_H_
#else
#define TWELL_OPS_ATTENTION_TILES_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "twell/ops/attention/attention_items.h"

HWY_BEFORE_NAMESPACE();
namespace twell::attention {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, kPad>;
using Vec = hn::Vec<Tag>;

HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(Tag())); }
HWY_INLINE int64_t whole_vectors(int64_t n) { return (n + lanes() - 1) / lanes() * lanes(); }

// Vectors of a row held at a time. 4 rows x 4 vectors of sums, 4 of B and one of A are 21 of 32
// registers; AVX2 and SSE have 16, and take 4 x 2 sums, which still cover the latency of two
// multiply-adds a cycle.
constexpr int kVectors = HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3 ? 2 : 4;

// A(i, k) = data[i * row + k * col]: a tile or its transpose.
struct Left {
  const float* data;
  int64_t row, col;
};

// C [kRows, kCols vectors] = A [kRows, depth] B [depth, kCols vectors], plus C where kAdd.
template <int kRows, int kCols, bool kAdd>
HWY_INLINE void multiply_block(Left a, const float* HWY_RESTRICT b, int64_t b_stride,
                               float* HWY_RESTRICT c, int64_t c_stride, int64_t depth) {
  const Tag d;
  const int64_t n = lanes();
  Vec sums[kRows][kCols];
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      sums[row][col] = kAdd ? hn::LoadU(d, c + row * c_stride + col * n) : hn::Zero(d);
    }
  }
  const float* a0 = a.data;
  for (int64_t k = 0; k < depth; ++k, a0 += a.col, b += b_stride) {
    Vec b_row[kCols];
    for (int col = 0; col < kCols; ++col) b_row[col] = hn::LoadU(d, b + col * n);
    for (int row = 0; row < kRows; ++row) {
      const Vec v = hn::Set(d, a0[row * a.row]);
      for (int col = 0; col < kCols; ++col) {
        sums[row][col] = hn::MulAdd(v, b_row[col], sums[row][col]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      hn::StoreU(sums[row][col], d, c + row * c_stride + col * n);
    }
  }
}

template <int kRows, bool kAdd>
HWY_INLINE void multiply_rows(Left a, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                              int64_t cols, int64_t depth) {
  const int64_t n = lanes();
  int64_t col = 0;
  if constexpr (kVectors == 4) {
    for (; col + 4 * n <= cols; col += 4 * n) {
      multiply_block<kRows, 4, kAdd>(a, b + col, b_stride, c + col, c_stride, depth);
    }
  }
  for (; col + 2 * n <= cols; col += 2 * n) {
    multiply_block<kRows, 2, kAdd>(a, b + col, b_stride, c + col, c_stride, depth);
  }
  for (; col < cols; col += n) {
    multiply_block<kRows, 1, kAdd>(a, b + col, b_stride, c + col, c_stride, depth);
  }
}

// C [rows, cols] = A [rows, depth] B [depth, cols] (+ C). At most kStripRows rows; cols is padded:
// whole vectors are read and written.
template <bool kAdd>
HWY_NOINLINE void multiply_strip(Left a, const float* b, int64_t b_stride, float* c,
                                 int64_t c_stride, int64_t rows, int64_t cols, int64_t depth) {
  if (rows == kStripRows) {
    multiply_rows<kStripRows, kAdd>(a, b, b_stride, c, c_stride, cols, depth);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    multiply_rows<1, kAdd>({a.data + row * a.row, a.row, a.col}, b, b_stride, c + row * c_stride,
                           c_stride, cols, depth);
  }
}

// to [cols, end of kTileKeys] = transpose of from [rows <= end, cols]; missing rows become zero.
inline HWY_NOINLINE void pack_transposed(const float* from, int64_t stride, int64_t rows,
                                         int64_t cols, float* to, int64_t end = kTileKeys) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  // 4 x 4 values at a time, in one 128-bit block per row.
  const hn::FixedTag<float, 4> d4;
  const hn::Repartition<uint64_t, decltype(d4)> d2;
  const int64_t whole_cols = cols / 4 * 4;
  for (; r + 4 <= rows; r += 4) {
    const float* row = from + r * stride;
    for (int64_t c = 0; c < whole_cols; c += 4) {
      const auto v0 = hn::LoadU(d4, row + c), v1 = hn::LoadU(d4, row + stride + c);
      const auto v2 = hn::LoadU(d4, row + 2 * stride + c);
      const auto v3 = hn::LoadU(d4, row + 3 * stride + c);
      const auto low01 = hn::BitCast(d2, hn::InterleaveLower(d4, v0, v1));
      const auto low23 = hn::BitCast(d2, hn::InterleaveLower(d4, v2, v3));
      const auto high01 = hn::BitCast(d2, hn::InterleaveUpper(d4, v0, v1));
      const auto high23 = hn::BitCast(d2, hn::InterleaveUpper(d4, v2, v3));
      float* out = to + c * kTileKeys + r;
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, low01, low23)), d4, out);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, low01, low23)), d4, out + kTileKeys);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, high01, high23)), d4, out + 2 * kTileKeys);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, high01, high23)), d4, out + 3 * kTileKeys);
    }
    for (int64_t c = whole_cols; c < cols; ++c) {
      for (int64_t i = 0; i < 4; ++i) to[c * kTileKeys + r + i] = row[i * stride + c];
    }
  }
#endif
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t i = r; i < rows; ++i) to[c * kTileKeys + i] = from[i * stride + c];
    std::fill(to + c * kTileKeys + rows, to + c * kTileKeys + end, 0.0f);
  }
}

// to [padded(cols)] = scale * from [cols], the padding zero.
HWY_INLINE void pack_row(const float* from, int64_t cols, float scale, float* to) {
  const Tag d;
  int64_t c = 0;
  for (; c + lanes() <= cols; c += lanes()) {
    hn::StoreU(hn::Mul(hn::LoadU(d, from + c), hn::Set(d, scale)), d, to + c);
  }
  for (; c < cols; ++c) to[c] = scale * from[c];
  std::fill(to + cols, to + padded(cols), 0.0f);
}

// A tile of rows of at least padded(cols) readable floats: the rows themselves, or a copy.
struct Tile {
  const float* data;
  int64_t stride;
};
HWY_INLINE Tile padded_tile(const float* from, int64_t stride, int64_t rows, int64_t cols,
                            float* copy) {
  if (padded(cols) == cols) return {from, stride};
  for (int64_t r = 0; r < rows; ++r)
    pack_row(from + r * stride, cols, 1.0f, copy + r * padded(cols));
  return {copy, padded(cols)};
}

// to [rows, padded(hd)] = columns [at, at + hd) of the 8-bit rows from `first` on, the padding
// zero. cols: of all heads.
HWY_INLINE void expand_rows(const AttentionRows8& from, int64_t first, int64_t rows, int64_t cols,
                            int64_t at, int64_t hd, float* to) {
  const Tag d;
  const hn::Rebind<int32_t, Tag> d32;
  const hn::Rebind<int8_t, Tag> d8;
  for (int64_t r = 0; r < rows; ++r, to += padded(hd)) {
    const int8_t* data = from.data + (first + r) * cols + at;
    const float scale = from.scale[((first + r) * cols + at) / hd];
    int64_t c = 0;
    for (; c + lanes() <= hd; c += lanes()) {
      const Vec value = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, data + c)));
      hn::StoreU(hn::Mul(value, hn::Set(d, scale)), d, to + c);
    }
    for (; c < hd; ++c) to[c] = scale * static_cast<float>(data[c]);
    std::fill(to + hd, to + padded(hd), 0.0f);
  }
}

// x *= factor, n a multiple of the vector size
HWY_INLINE void scale_row(float* x, float factor, int64_t n) {
  const Tag d;
  const Vec f = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += lanes()) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, x + i);
}

// to = (or +=) factor * from
HWY_INLINE void add_scaled(const float* from, float factor, int64_t n, bool add, float* to) {
  const Tag d;
  const Vec f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) {
    const Vec before = add ? hn::LoadU(d, to + i) : hn::Zero(d);
    hn::StoreU(hn::MulAdd(f, hn::LoadU(d, from + i), before), d, to + i);
  }
  for (; i < n; ++i) to[i] = (add ? to[i] : 0.0f) + factor * from[i];
}

HWY_INLINE float dot_row(const float* a, const float* b, int64_t n) {
  const Tag d;
  Vec sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) {
    sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace twell::attention
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
