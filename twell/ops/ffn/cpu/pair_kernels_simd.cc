// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/cpu/pair_kernels_simd.h"

#include <hwy/cache_control.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/ffn/cpu/pair_kernels_simd.cc"
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

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using D1 = hn::CappedTag<float, 1>;  // tails: the same fused arithmetic, one element at a time

// <a, b[i]> for the N rows b, with two chains of additions each: N = 4 keeps eight multiply-adds in
// flight, which covers their latency, and the order of a sum is the same for every N. Prefetches
// the lines that the next group of rows needs.
template <int N, typename T>
HWY_INLINE void dot_group(const AddDots& p, int64_t at) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const T* rows[N];
  const T* next[N];
  for (int i = 0; i < N; ++i) {
    rows[i] = static_cast<const T*>(p.b[at + i]);
    next[i] = static_cast<const T*>(at + N + i < p.count ? p.b[at + N + i] : p.prefetch);
  }
  VF even[N], odd[N];
  for (int i = 0; i < N; ++i) even[i] = odd[i] = hn::Zero(df);
  int64_t k = 0;
  for (; k + 2 * lanes <= p.d; k += 2 * lanes) {
    const VF a0 = hn::LoadU(df, p.a + k);
    const VF a1 = hn::LoadU(df, p.a + k + lanes);
    for (int i = 0; i < N; ++i) {
      even[i] = hn::MulAdd(a0, load_weights(df, rows[i] + k), even[i]);
      odd[i] = hn::MulAdd(a1, load_weights(df, rows[i] + k + lanes), odd[i]);
      hwy::Prefetch(next[i] + k);
      if constexpr (sizeof(T) == sizeof(float)) hwy::Prefetch(next[i] + k + lanes);
    }
  }
  for (int i = 0; i < N; ++i) {
    const D1 d1;
    auto tail = hn::Set(d1, hn::GetLane(hn::SumOfLanes(df, hn::Add(even[i], odd[i]))));
    for (int64_t j = k; j < p.d; ++j) {
      tail = hn::MulAdd(hn::LoadU(d1, p.a + j), load_weights(d1, rows[i] + j), tail);
    }
    p.sums[at + i] += hn::GetLane(tail);
  }
}

template <typename T>
void add_dots_of(const AddDots& p) {
  int64_t i = 0;
  for (; i + 4 <= p.count; i += 4) dot_group<4, T>(p, i);
  if (i + 2 <= p.count) {
    dot_group<2, T>(p, i);
    i += 2;
  }
  if (i < p.count) dot_group<1, T>(p, i);
}

void add_dots_simd(const AddDots& p) {
  with_weight_type(p.b_dtype, [&]<typename T>(const T*) { add_dots_of<T>(p); });
}

// y += the N rows at `at`, in their order.
template <int N, typename T>
HWY_INLINE void add_group(const SumRows& p, int64_t at) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const T* rows[N];
  const T* next[N];
  VF scale[N];
  for (int i = 0; i < N; ++i) {
    rows[i] = static_cast<const T*>(p.rows[at + i]);
    next[i] = static_cast<const T*>(at + N + i < p.count ? p.rows[at + N + i] : p.prefetch);
    scale[i] = hn::Set(df, p.scale[at + i]);
  }
  int64_t k = 0;
  for (; k + lanes <= p.d; k += lanes) {
    VF sum = hn::LoadU(df, p.y + k);
    for (int i = 0; i < N; ++i) {
      sum = hn::MulAdd(scale[i], load_weights(df, rows[i] + k), sum);
      hwy::Prefetch(next[i] + k);
    }
    hn::StoreU(sum, df, p.y + k);
  }
  const D1 d1;
  for (; k < p.d; ++k) {
    auto sum = hn::LoadU(d1, p.y + k);
    for (int i = 0; i < N; ++i) {
      sum = hn::MulAdd(hn::Set(d1, p.scale[at + i]), load_weights(d1, rows[i] + k), sum);
    }
    hn::StoreU(sum, d1, p.y + k);
  }
}

template <typename T>
void add_scaled_rows_of(const SumRows& p) {
  int64_t i = 0;
  for (; i + 4 <= p.count; i += 4) add_group<4, T>(p, i);
  if (i + 2 <= p.count) {
    add_group<2, T>(p, i);
    i += 2;
  }
  if (i < p.count) add_group<1, T>(p, i);
}

void add_scaled_rows_simd(const SumRows& p) {
  with_weight_type(p.dtype, [&]<typename T>(const T*) { add_scaled_rows_of<T>(p); });
}

// Loads come before stores: rows are often a multiple of 4 KiB apart, and a load that follows a
// store to the same offset within a page waits for it.
template <int N>
HWY_INLINE void spread_group(const SpreadRow& p, int64_t at) {
  const DF df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  float* const* y = p.y + at;
  VF scale[N];
  for (int i = 0; i < N; ++i) scale[i] = hn::Set(df, p.scale[at + i]);
  int64_t k = 0;
  for (; k + lanes <= p.d; k += lanes) {
    const VF row = hn::LoadU(df, p.row + k);
    VF sum[N];
    for (int i = 0; i < N; ++i) sum[i] = hn::MulAdd(scale[i], row, hn::LoadU(df, y[i] + k));
    for (int i = 0; i < N; ++i) hn::StoreU(sum[i], df, y[i] + k);
  }
  const D1 d1;
  for (; k < p.d; ++k) {
    for (int i = 0; i < N; ++i) {
      const auto s = hn::Set(d1, p.scale[at + i]);
      hn::StoreU(hn::MulAdd(s, hn::LoadU(d1, p.row + k), hn::LoadU(d1, y[i] + k)), d1, y[i] + k);
    }
  }
}

void spread_scaled_row_simd(const SpreadRow& p) {
  int64_t i = 0;
  for (; i + 4 <= p.count; i += 4) spread_group<4>(p, i);
  if (i + 2 <= p.count) {
    spread_group<2>(p, i);
    i += 2;
  }
  if (i < p.count) spread_group<1>(p, i);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {

HWY_EXPORT(add_dots_simd);
HWY_EXPORT(add_scaled_rows_simd);
HWY_EXPORT(spread_scaled_row_simd);

void add_dots(const AddDots& problem) { HWY_DYNAMIC_DISPATCH(add_dots_simd)(problem); }
void add_scaled_rows(const SumRows& problem) {
  HWY_DYNAMIC_DISPATCH(add_scaled_rows_simd)(problem);
}
void spread_scaled_row(const SpreadRow& problem) {
  HWY_DYNAMIC_DISPATCH(spread_scaled_row_simd)(problem);
}

}  // namespace twell
#endif  // HWY_ONCE
