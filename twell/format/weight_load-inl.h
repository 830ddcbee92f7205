// SPDX-License-Identifier: Apache-2.0
// load_weights: loads a vector of weights and widens it to f32. Include it inside of Highway's
// per-target code, after hwy/highway.h; it is compiled once per instruction set.
#if defined(TWELL_FORMAT_WEIGHT_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWELL_FORMAT_WEIGHT_LOAD_INL_H_
#undef TWELL_FORMAT_WEIGHT_LOAD_INL_H_
#else
#define TWELL_FORMAT_WEIGHT_LOAD_INL_H_
#endif

#include <hwy/highway.h>

#include "twell/format/weight_matrix.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> load_weights(D d, const float* values) {
  return hwy::HWY_NAMESPACE::LoadU(d, values);
}

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> load_weights(D d, const BF16* values) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(values));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> load_weights(D d, const F16* values) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(values)));
}

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> load_weights(D d, const I8* values) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<int8_t, D> d8;
  const hn::Rebind<int32_t, D> d32;
  const auto bytes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(values));
  return hn::ConvertTo(d, hn::PromoteTo(d32, bytes));
}

}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#endif  // the toggle
