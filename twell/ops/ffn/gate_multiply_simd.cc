// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gate_multiply_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/ffn/gate_multiply_simd.cc"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

template <bool kGated, bool kSquared, class D>
int64_t activate(D d, const float* gate, const float* u, float* h) {
  const auto g = hn::LoadU(d, gate);
  const auto fires = hn::Not(hn::Le(g, hn::Zero(d)));
  auto value = g;
  if (kSquared) value = hn::Mul(value, g);
  if (kGated) value = hn::Mul(value, hn::LoadU(d, u));
  hn::StoreU(hn::IfThenElseZero(fires, value), d, h);
  return static_cast<int64_t>(hn::CountTrue(d, fires));
}

template <bool kGated, bool kSquared>
int64_t activate_row(const float* gate, const float* u, float* h, int64_t n) {
  const hn::ScalableTag<float> full;
  const hn::CappedTag<float, 1> single;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(full));
  int64_t count = 0;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    count += activate<kGated, kSquared>(full, gate + i, u + i, h + i);
  }
  for (; i < n; ++i) count += activate<kGated, kSquared>(single, gate + i, u + i, h + i);
  return count;
}

int64_t gate_multiply_simd(const float* gate, const float* u, float* h, int64_t n, bool squared) {
  if (u == nullptr) {
    return squared ? activate_row<false, true>(gate, gate, h, n)
                   : activate_row<false, false>(gate, gate, h, n);
  }
  return squared ? activate_row<true, true>(gate, u, h, n)
                 : activate_row<true, false>(gate, u, h, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {

HWY_EXPORT(gate_multiply_simd);

int64_t gate_multiply(const float* gate, const float* u, float* h, int64_t n, bool squared) {
  return HWY_DYNAMIC_DISPATCH(gate_multiply_simd)(gate, u, h, n, squared);
}

}  // namespace twell
#endif  // HWY_ONCE
