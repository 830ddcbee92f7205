// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/elementwise_simd.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/ffn_train/elementwise_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Every function is written once over a tag D: the full vector, then single lanes for the rest.
// NaN is not <= 0: it counts as active and stays.
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

using Full = hn::ScalableTag<float>;
using Single = hn::CappedTag<float, 1>;

// Calls step(tag, i, l1 sum) over [0, n). Float sums are widened every kWiden vectors.
template <class Step>
RowActivity sum_over_row(int64_t n, const Step& step) {
  constexpr int64_t kWiden = 16;
  const Full full;
  const Single single;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(full));
  size_t nnz = 0;
  double l1 = 0.0;
  int64_t i = 0;
  while (i + lanes <= n) {
    auto sum = hn::Zero(full);
    for (int64_t k = 0; k < kWiden && i + lanes <= n; ++k, i += lanes) nnz += step(full, i, sum);
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
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(Full()));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) step(Full(), i);
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

}  // namespace twell
#endif  // HWY_ONCE
