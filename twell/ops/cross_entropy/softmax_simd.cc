// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/cross_entropy/softmax_simd.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/cross_entropy/softmax_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// exp(x) for x <= 0, to 2 ulp: x = n ln2 + r, |r| <= ln2 / 2, and the Taylor series of e^r to the
// 7th power (the next term is below 2^-27). Below -87 the result would be subnormal: 0. NaN stays.
V exp_non_positive(V x) {
  const D d;
  const hn::RebindToSigned<D> di;
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // 9 bits: n * kLn2High is exact for |n| < 2^15
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kLowest = -87.0f;
  const auto in_range = hn::Ge(x, hn::Set(d, kLowest));
  const V clamped = hn::Max(x, hn::Set(d, kLowest));
  const V n = hn::Round(hn::Mul(clamped, hn::Set(d, kLog2E)));
  const V r =
      hn::NegMulAdd(n, hn::Set(d, kLn2Low), hn::NegMulAdd(n, hn::Set(d, kLn2High), clamped));
  V p = hn::Set(d, 1.0f / 5040.0f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(hn::Mul(r, r), p, hn::Add(r, hn::Set(d, 1.0f)));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  const V scaled = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenElseZero(in_range, scaled));
}

float row_max(const float* row, int64_t n) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V max0 = hn::Set(d, row[0]);
  V max1 = max0;
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    max0 = hn::Max(max0, hn::LoadU(d, row + i));
    max1 = hn::Max(max1, hn::LoadU(d, row + i + lanes));
  }
  float result = hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
  for (; i < n; ++i) result = std::max(result, row[i]);
  return result;
}

// Sums 16 values in float, then widens the partial sum to double.
double exp_and_sum(float* row, int64_t n, float max) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kBlock = 16;
  const V shift = hn::Set(d, max);
  double total = 0.0;
  int64_t i = 0;
  while (i + lanes <= n) {
    V sum = hn::Zero(d);
    for (int64_t step = 0; step < kBlock && i + lanes <= n; ++step, i += lanes) {
      const V e = exp_non_positive(hn::Sub(hn::LoadU(d, row + i), shift));
      hn::StoreU(e, d, row + i);
      sum = hn::Add(sum, e);
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  for (; i < n; ++i) {
    row[i] = hn::GetLane(exp_non_positive(hn::Set(d, row[i] - max)));
    total += static_cast<double>(row[i]);
  }
  return total;
}

void scale(float* row, int64_t n, float factor) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const V f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, row + i), f), d, row + i);
  for (; i < n; ++i) row[i] *= factor;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
namespace {
HWY_EXPORT(row_max);
HWY_EXPORT(exp_and_sum);
HWY_EXPORT(scale);
}  // namespace

RowSoftmax exp_row(float* row, int64_t n) {
  RowSoftmax result;
  result.max = HWY_DYNAMIC_DISPATCH(row_max)(row, n);
  result.sum = HWY_DYNAMIC_DISPATCH(exp_and_sum)(row, n, result.max);
  return result;
}

void scale_row(float* row, int64_t n, float factor) { HWY_DYNAMIC_DISPATCH(scale)(row, n, factor); }

}  // namespace twell
#endif  // HWY_ONCE
