// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/bf16_rounding.h"

#include "twell/format/weight_matrix.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/matmul/bf16_rounding.cc"
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

// The bits of to_bf16, with their sign shifted in: all fit into 16 bits.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> rounded_bits(D /* d */, hn::Vec<D> values) {
  const hn::RebindToSigned<D> d32;
  const auto bits = hn::BitCast(d32, values);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  const auto nan = hn::RebindMask(d32, hn::IsNaN(values));
  return hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
}

template <typename T>
void narrow_values(const T* values, int64_t count, int16_t* out) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<int16_t, decltype(d)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = rounded_bits(d, load_weights(d, values + i));
    hn::StoreU(hn::DemoteTo(d16, bits), d16, out + i);
  }
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) {
    out[i] = static_cast<int16_t>(hn::GetLane(rounded_bits(one, load_weights(one, values + i))));
  }
}

void narrow(const std::byte* values, DType dtype, int64_t count, BF16* out) {
  with_weight_type(dtype, [&]<typename T>(const T*) {
    narrow_values(reinterpret_cast<const T*>(values), count, reinterpret_cast<int16_t*>(out));
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(narrow);

void round_to_bf16(const std::byte* values, DType dtype, int64_t count, BF16* out) {
  HWY_DYNAMIC_DISPATCH(narrow)(values, dtype, count, out);
}

}  // namespace twell
#endif  // HWY_ONCE
