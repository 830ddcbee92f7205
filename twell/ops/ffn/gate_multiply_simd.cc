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
using DF = hn::ScalableTag<float>;

int64_t gate_multiply_simd(const float* gate, const float* u, float* h, int64_t n) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t count = 0;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto g = hn::LoadU(df, gate + i);
    const auto fires = hn::Gt(g, hn::Zero(df));
    hn::StoreU(hn::IfThenElseZero(fires, hn::Mul(g, hn::LoadU(df, u + i))), df, h + i);
    count += static_cast<int64_t>(hn::CountTrue(df, fires));
  }
  for (; i < n; ++i) {
    const bool fires = gate[i] > 0.0f;
    h[i] = fires ? gate[i] * u[i] : 0.0f;
    count += fires;
  }
  return count;
}

int64_t relu_count_simd(float* h, int64_t n) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t count = 0;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(df, h + i);
    const auto fires = hn::Gt(v, hn::Zero(df));
    hn::StoreU(hn::IfThenElseZero(fires, v), df, h + i);
    count += static_cast<int64_t>(hn::CountTrue(df, fires));
  }
  for (; i < n; ++i) {
    const bool fires = h[i] > 0.0f;
    h[i] = fires ? h[i] : 0.0f;
    count += fires;
  }
  return count;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {

HWY_EXPORT(gate_multiply_simd);
HWY_EXPORT(relu_count_simd);

int64_t gate_multiply(const float* gate, const float* u, float* h, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(gate_multiply_simd)(gate, u, h, n);
}
int64_t relu_count(float* h, int64_t n) { return HWY_DYNAMIC_DISPATCH(relu_count_simd)(h, n); }

}  // namespace twell
#endif  // HWY_ONCE
