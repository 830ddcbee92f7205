// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/rows_simd.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/ffn_train/rows_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Full = hn::ScalableTag<float>;
using FullU32 = hn::RebindToUnsigned<Full>;
using V = hn::Vec<Full>;
using Single = hn::CappedTag<float, 1>;

int64_t lanes() { return static_cast<int64_t>(hn::Lanes(Full())); }

// --- Dense rows ---

// Every step is written once over a tag D, which is the full vector and then, for the rest of a
// row, a single lane. NaN is not <= 0, so it counts as active and stays.
template <class D>
hn::Mask<D> inactive(D d, hn::Vec<D> g) {
  return hn::Le(g, hn::Zero(d));
}

template <class D>
size_t mark_and_count(D d, hn::Mask<D> off, float* fired) {
  if (fired != nullptr) {
    hn::StoreU(hn::IfThenElse(off, hn::LoadU(d, fired), hn::Set(d, 1.0f)), d, fired);
  }
  return hn::CountTrue(d, hn::Not(off));
}

template <class D>
size_t gate_step(D d, float* gate, const float* up, float* h, float* fired, hn::Vec<D>& l1) {
  const auto x = hn::LoadU(d, gate);
  const auto off = inactive(d, x);
  const auto g = hn::IfThenZeroElse(off, x);
  const auto product = hn::Mul(g, hn::LoadU(d, up));
  hn::StoreU(g, d, gate);
  hn::StoreU(product, d, h);
  l1 = hn::Add(l1, hn::Abs(product));
  return mark_and_count(d, off, fired);
}

template <class D>
size_t relu_step(D d, float* h, float* fired, hn::Vec<D>& l1) {
  const auto x = hn::LoadU(d, h);
  const auto off = inactive(d, x);
  const auto value = hn::IfThenZeroElse(off, x);
  hn::StoreU(value, d, h);
  l1 = hn::Add(l1, value);
  return mark_and_count(d, off, fired);
}

template <class D>
void gated_backward_step(D d, const float* gate, const float* up, float l1, float* d_h, float* d_up,
                         float* h) {
  const auto g = hn::LoadU(d, gate);
  const auto u = hn::LoadU(d, up);
  const auto product = hn::Mul(g, u);
  const auto zero = hn::Zero(d);
  const auto sign =
      hn::IfThenElse(hn::Eq(product, zero), zero, hn::CopySign(hn::Set(d, 1.0f), product));
  const auto d_product = hn::MulAdd(hn::Set(d, l1), sign, hn::LoadU(d, d_h));
  hn::StoreU(product, d, h);
  hn::StoreU(hn::Mul(d_product, g), d, d_up);
  hn::StoreU(hn::IfThenZeroElse(inactive(d, g), hn::Mul(d_product, u)), d, d_h);
}

template <class D>
void relu_backward_step(D d, const float* h, float l1, float* d_h) {
  const auto gradient = hn::Add(hn::LoadU(d, d_h), hn::Set(d, l1));
  hn::StoreU(hn::IfThenZeroElse(inactive(d, hn::LoadU(d, h)), gradient), d, d_h);
}

// Calls step(tag, i, l1 sum) over [0, n). The float sums are added to a double every kWiden
// vectors.
template <class Step>
RowActivity sum_over_row(int64_t n, const Step& step) {
  constexpr int64_t kWiden = 16;
  const Full full;
  const Single single;
  size_t nnz = 0;
  double l1 = 0.0;
  int64_t i = 0;
  while (i + lanes() <= n) {
    auto sum = hn::Zero(full);
    for (int64_t k = 0; k < kWiden && i + lanes() <= n; ++k, i += lanes())
      nnz += step(full, i, sum);
    l1 += static_cast<double>(hn::GetLane(hn::SumOfLanes(full, sum)));
  }
  for (; i < n; ++i) {
    auto sum = hn::Zero(single);
    nnz += step(single, i, sum);
    l1 += static_cast<double>(hn::GetLane(sum));
  }
  return {static_cast<int32_t>(nnz), l1};
}

template <class Step>
void over_row(int64_t n, const Step& step) {
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) step(Full(), i);
  for (; i < n; ++i) step(Single(), i);
}

RowActivity relu_gate(float* gate, const float* up, float* h, float* fired, int64_t n) {
  return sum_over_row(n, [=](auto d, int64_t i, auto& l1) HWY_ATTR {
    return gate_step(d, gate + i, up + i, h + i, fired == nullptr ? nullptr : fired + i, l1);
  });
}

RowActivity relu_only(float* h, float* fired, int64_t n) {
  return sum_over_row(n, [=](auto d, int64_t i, auto& l1) HWY_ATTR {
    return relu_step(d, h + i, fired == nullptr ? nullptr : fired + i, l1);
  });
}

void gated_backward(const float* gate, const float* up, float l1, float* d_h, float* d_up, float* h,
                    int64_t n) {
  over_row(n, [=](auto d, int64_t i) HWY_ATTR {
    gated_backward_step(d, gate + i, up + i, l1, d_h + i, d_up + i, h + i);
  });
}

void relu_backward(const float* h, float l1, float* d_h, int64_t n) {
  over_row(n, [=](auto d, int64_t i) HWY_ATTR { relu_backward_step(d, h + i, l1, d_h + i); });
}

// --- Sparse rows ---

int64_t count_of_active(const float* gate, int64_t n) {
  const Full d;
  size_t count = 0;
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) {
    count += hn::CountTrue(d, hn::Not(hn::Le(hn::LoadU(d, gate + i), hn::Zero(d))));
  }
  for (; i < n; ++i) count += gate[i] <= 0.0f ? 0 : 1;
  return static_cast<int64_t>(count);
}

void compress(const float* gate, int64_t n, uint32_t* index, float* value) {
  const Full d;
  const FullU32 di;
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) {
    const auto g = hn::LoadU(d, gate + i);
    const auto active = hn::Not(hn::Le(g, hn::Zero(d)));
    // Most vectors of a sparse row have no active lane.
    if (hn::AllFalse(d, active)) continue;
    const auto column = hn::Iota(di, static_cast<uint32_t>(i));
    // A blended store writes nothing past the last active lane, where the next row begins.
    hn::CompressBlendedStore(column, hn::RebindMask(di, active), di, index);
    const size_t stored = hn::CompressBlendedStore(g, active, d, value);
    index += stored;
    value += stored;
  }
  for (; i < n; ++i) {
    if (gate[i] <= 0.0f) continue;
    *index++ = static_cast<uint32_t>(i);
    *value++ = gate[i];
  }
}

// Four rows share the loads of x. Two accumulators per row hide the latency of the multiply-add.
void dots_of_four(const float* x, const float* const row[4], int64_t width, float* out) {
  const Full d;
  V a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0;
  V b0 = a0, b1 = a0, b2 = a0, b3 = a0;
  const int64_t step = lanes();
  int64_t k = 0;
  for (; k + 2 * step <= width; k += 2 * step) {
    const V x0 = hn::LoadU(d, x + k);
    const V x1 = hn::LoadU(d, x + k + step);
    a0 = hn::MulAdd(x0, hn::LoadU(d, row[0] + k), a0);
    a1 = hn::MulAdd(x0, hn::LoadU(d, row[1] + k), a1);
    a2 = hn::MulAdd(x0, hn::LoadU(d, row[2] + k), a2);
    a3 = hn::MulAdd(x0, hn::LoadU(d, row[3] + k), a3);
    b0 = hn::MulAdd(x1, hn::LoadU(d, row[0] + k + step), b0);
    b1 = hn::MulAdd(x1, hn::LoadU(d, row[1] + k + step), b1);
    b2 = hn::MulAdd(x1, hn::LoadU(d, row[2] + k + step), b2);
    b3 = hn::MulAdd(x1, hn::LoadU(d, row[3] + k + step), b3);
  }
  out[0] = hn::GetLane(hn::SumOfLanes(d, hn::Add(a0, b0)));
  out[1] = hn::GetLane(hn::SumOfLanes(d, hn::Add(a1, b1)));
  out[2] = hn::GetLane(hn::SumOfLanes(d, hn::Add(a2, b2)));
  out[3] = hn::GetLane(hn::SumOfLanes(d, hn::Add(a3, b3)));
  for (; k < width; ++k) {
    for (int r = 0; r < 4; ++r) out[r] += x[k] * row[r][k];
  }
}

void dots(const float* x, const ConstMatrixF& table, const uint32_t* rows, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 4) {
    // A short last group repeats its last row.
    const float* row[4];
    for (int64_t r = 0; r < 4; ++r) row[r] = table.row(rows[HWY_MIN(i + r, n - 1)]);
    float sums[4];
    dots_of_four(x, row, table.cols, sums);
    for (int64_t r = 0; r < HWY_MIN(n - i, int64_t{4}); ++r) out[i + r] += sums[r];
  }
}

// Four vectors of columns from column k on, as four independent chains of additions.
void sum_columns4(const float* factor, const ConstMatrixF& table, const uint32_t* rows, int64_t n,
                  int64_t k, float* out) {
  const Full d;
  const int64_t step = lanes();
  V s0 = hn::LoadU(d, out + k);
  V s1 = hn::LoadU(d, out + k + step);
  V s2 = hn::LoadU(d, out + k + 2 * step);
  V s3 = hn::LoadU(d, out + k + 3 * step);
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = table.row(rows[i]) + k;
    const V f = hn::Set(d, factor[i]);
    s0 = hn::MulAdd(f, hn::LoadU(d, row), s0);
    s1 = hn::MulAdd(f, hn::LoadU(d, row + step), s1);
    s2 = hn::MulAdd(f, hn::LoadU(d, row + 2 * step), s2);
    s3 = hn::MulAdd(f, hn::LoadU(d, row + 3 * step), s3);
  }
  hn::StoreU(s0, d, out + k);
  hn::StoreU(s1, d, out + k + step);
  hn::StoreU(s2, d, out + k + 2 * step);
  hn::StoreU(s3, d, out + k + 3 * step);
}

// One vector of columns, or one column.
template <class Tag>
void sum_columns(Tag d, const float* factor, const ConstMatrixF& table, const uint32_t* rows,
                 int64_t n, int64_t k, float* out) {
  auto total = hn::LoadU(d, out + k);
  for (int64_t i = 0; i < n; ++i) {
    total = hn::MulAdd(hn::Set(d, factor[i]), hn::LoadU(d, table.row(rows[i]) + k), total);
  }
  hn::StoreU(total, d, out + k);
}

void sum(const float* factor, const ConstMatrixF& table, const uint32_t* rows, int64_t n,
         float* out) {
  int64_t k = 0;
  for (; k + 4 * lanes() <= table.cols; k += 4 * lanes()) {
    sum_columns4(factor, table, rows, n, k, out);
  }
  for (; k + lanes() <= table.cols; k += lanes())
    sum_columns(Full(), factor, table, rows, n, k, out);
  for (; k < table.cols; ++k) sum_columns(Single(), factor, table, rows, n, k, out);
}

void sum2_columns4(const float* factor_a, const float* factor_b, const ConstMatrixF& table,
                   const uint32_t* rows, int64_t n, int64_t k, float* out_a, float* out_b) {
  const Full d;
  const int64_t step = lanes();
  V a0 = hn::LoadU(d, out_a + k);
  V a1 = hn::LoadU(d, out_a + k + step);
  V a2 = hn::LoadU(d, out_a + k + 2 * step);
  V a3 = hn::LoadU(d, out_a + k + 3 * step);
  V b0 = hn::LoadU(d, out_b + k);
  V b1 = hn::LoadU(d, out_b + k + step);
  V b2 = hn::LoadU(d, out_b + k + 2 * step);
  V b3 = hn::LoadU(d, out_b + k + 3 * step);
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = table.row(rows[i]) + k;
    const V fa = hn::Set(d, factor_a[i]);
    const V fb = hn::Set(d, factor_b[i]);
    const V r0 = hn::LoadU(d, row);
    const V r1 = hn::LoadU(d, row + step);
    const V r2 = hn::LoadU(d, row + 2 * step);
    const V r3 = hn::LoadU(d, row + 3 * step);
    a0 = hn::MulAdd(fa, r0, a0);
    a1 = hn::MulAdd(fa, r1, a1);
    a2 = hn::MulAdd(fa, r2, a2);
    a3 = hn::MulAdd(fa, r3, a3);
    b0 = hn::MulAdd(fb, r0, b0);
    b1 = hn::MulAdd(fb, r1, b1);
    b2 = hn::MulAdd(fb, r2, b2);
    b3 = hn::MulAdd(fb, r3, b3);
  }
  hn::StoreU(a0, d, out_a + k);
  hn::StoreU(a1, d, out_a + k + step);
  hn::StoreU(a2, d, out_a + k + 2 * step);
  hn::StoreU(a3, d, out_a + k + 3 * step);
  hn::StoreU(b0, d, out_b + k);
  hn::StoreU(b1, d, out_b + k + step);
  hn::StoreU(b2, d, out_b + k + 2 * step);
  hn::StoreU(b3, d, out_b + k + 3 * step);
}

template <class Tag>
void sum2_columns(Tag d, const float* factor_a, const float* factor_b, const ConstMatrixF& table,
                  const uint32_t* rows, int64_t n, int64_t k, float* out_a, float* out_b) {
  auto a = hn::LoadU(d, out_a + k);
  auto b = hn::LoadU(d, out_b + k);
  for (int64_t i = 0; i < n; ++i) {
    const auto row = hn::LoadU(d, table.row(rows[i]) + k);
    a = hn::MulAdd(hn::Set(d, factor_a[i]), row, a);
    b = hn::MulAdd(hn::Set(d, factor_b[i]), row, b);
  }
  hn::StoreU(a, d, out_a + k);
  hn::StoreU(b, d, out_b + k);
}

void sum2(const float* factor_a, const float* factor_b, const ConstMatrixF& table,
          const uint32_t* rows, int64_t n, float* out_a, float* out_b) {
  int64_t k = 0;
  for (; k + 4 * lanes() <= table.cols; k += 4 * lanes()) {
    sum2_columns4(factor_a, factor_b, table, rows, n, k, out_a, out_b);
  }
  for (; k + lanes() <= table.cols; k += lanes()) {
    sum2_columns(Full(), factor_a, factor_b, table, rows, n, k, out_a, out_b);
  }
  for (; k < table.cols; ++k) {
    sum2_columns(Single(), factor_a, factor_b, table, rows, n, k, out_a, out_b);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
namespace {
HWY_EXPORT(relu_gate);
HWY_EXPORT(relu_only);
HWY_EXPORT(gated_backward);
HWY_EXPORT(relu_backward);
HWY_EXPORT(count_of_active);
HWY_EXPORT(compress);
HWY_EXPORT(dots);
HWY_EXPORT(sum);
HWY_EXPORT(sum2);
}  // namespace

RowActivity relu_gate_row(float* gate, const float* up, float* h, float* fired, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(relu_gate)(gate, up, h, fired, n);
}

RowActivity relu_row(float* h, float* fired, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(relu_only)(h, fired, n);
}

void gated_backward_row(const float* gate, const float* up, float l1, float* d_h, float* d_up,
                        float* h, int64_t n) {
  HWY_DYNAMIC_DISPATCH(gated_backward)(gate, up, l1, d_h, d_up, h, n);
}

void relu_backward_row(const float* h, float l1, float* d_h, int64_t n) {
  HWY_DYNAMIC_DISPATCH(relu_backward)(h, l1, d_h, n);
}

int64_t count_active(const float* gate, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(count_of_active)(gate, n);
}

void compress_active(const float* gate, int64_t n, uint32_t* index, float* value) {
  HWY_DYNAMIC_DISPATCH(compress)(gate, n, index, value);
}

void gathered_dots(const float* x, ConstMatrixF table, const uint32_t* rows, int64_t n,
                   float* out) {
  HWY_DYNAMIC_DISPATCH(dots)(x, table, rows, n, out);
}

void gathered_sum(const float* factor, ConstMatrixF table, const uint32_t* rows, int64_t n,
                  float* out) {
  HWY_DYNAMIC_DISPATCH(sum)(factor, table, rows, n, out);
}

void gathered_sum2(const float* factor_a, const float* factor_b, ConstMatrixF table,
                   const uint32_t* rows, int64_t n, float* out_a, float* out_b) {
  HWY_DYNAMIC_DISPATCH(sum2)(factor_a, factor_b, table, rows, n, out_a, out_b);
}

}  // namespace twell
#endif  // HWY_ONCE
