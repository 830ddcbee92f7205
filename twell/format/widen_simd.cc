// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "twell/format/weight_matrix.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/format/widen_simd.cc"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "twell/format/weight_load-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void widen_values(const T* values, int64_t count, float* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load_weights(d, values + i), d, out + i);
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) hn::StoreU(load_weights(one, values + i), one, out + i);
}

void widen_bf16(const BF16* values, int64_t count, float* out) { widen_values(values, count, out); }
void widen_f16(const F16* values, int64_t count, float* out) { widen_values(values, count, out); }
void widen_i8(const I8* values, int64_t count, float* out) { widen_values(values, count, out); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_f16);
HWY_EXPORT(widen_i8);

void widen(const std::byte* values, DType dtype, int64_t count, float* out) {
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBF16:
      HWY_DYNAMIC_DISPATCH(widen_bf16)(reinterpret_cast<const BF16*>(values), count, out);
      return;
    case DType::kF16:
      HWY_DYNAMIC_DISPATCH(widen_f16)(reinterpret_cast<const F16*>(values), count, out);
      return;
    case DType::kI8:
      HWY_DYNAMIC_DISPATCH(widen_i8)(reinterpret_cast<const I8*>(values), count, out);
      return;
  }
}

}  // namespace twell
#endif  // HWY_ONCE
