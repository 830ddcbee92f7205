// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler_simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/infer/sampler_simd.cc"
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
using DD = hn::ScalableTag<double>;
using DH = hn::Rebind<float, DD>;  // as many logits as a vector has weights

// Calls vectors(at) for whole vectors of the tag, then one(at) for each of the rest.
template <typename D, typename Vectors, typename One>
HWY_INLINE void for_each_logit(D d, int64_t n, const Vectors& vectors, const One& one) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t at = 0;
  for (; at + lanes <= n; at += lanes) vectors(at);
  for (; at < n; ++at) one(at);
}

LogitRange range_of(std::span<const float> logits) {
  const DF d;
  const float* const x = logits.data();
  auto high = hn::Set(d, x[0]), low = high;
  auto nan = hn::IsNaN(high);
  LogitRange range{x[0], x[0], false};
  for_each_logit(
      d, std::ssize(logits),
      [&](int64_t at) {
        const auto v = hn::LoadU(d, x + at);
        high = hn::Max(high, v);
        low = hn::Min(low, v);
        nan = hn::Or(nan, hn::IsNaN(v));
      },
      [&](int64_t at) {
        range.highest = std::max(range.highest, x[at]);
        range.lowest = std::min(range.lowest, x[at]);
        range.has_nan |= std::isnan(x[at]);
      });
  range.highest = std::max(range.highest, hn::GetLane(hn::MaxOfLanes(d, high)));
  range.lowest = std::min(range.lowest, hn::GetLane(hn::MinOfLanes(d, low)));
  range.has_nan |= !hn::AllFalse(d, nan);
  return range;
}

int64_t position_of(std::span<const float> logits, float value) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto wanted = hn::Set(d, value);
  int64_t at = 0;
  for (; at + lanes <= std::ssize(logits); at += lanes) {
    const intptr_t found = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, logits.data() + at), wanted));
    if (found >= 0) return at + found;
  }
  while (logits[static_cast<size_t>(at)] != value) ++at;
  return at;
}

// exp((logit - top) / temperature) to 2^-50, at least 2^-1000: enough for any probability to come
// out as zero. As 2^k 2^f, |f| <= 1/2, where 2^f is a polynomial through Chebyshev nodes.
class Weigher {
 public:
  HWY_INLINE explicit Weigher(const LogitWeights& w)
      : top_(w.top), per_unit_(w.per_unit * 1.4426950408889634), lowest_(-1000.0 / per_unit_) {}

  HWY_INLINE hn::Vec<DD> operator()(hn::Vec<DH> logits) const {
    const DD d;
    const hn::RebindToSigned<DD> bits;
    const auto distance =
        hn::Max(hn::Sub(hn::PromoteTo(d, logits), hn::Set(d, top_)), hn::Set(d, lowest_));
    // Added to a number whose last place is 1, k is rounded to an integer, which is in the lowest
    // bits of the sum.
    const auto rounder = hn::Set(d, 6755399441055744.0);  // 1.5 * 2^52
    const auto per_unit = hn::Set(d, per_unit_);
    const auto sum = hn::MulAdd(distance, per_unit, rounder);
    const auto f = hn::MulSub(distance, per_unit, hn::Sub(sum, rounder));
    constexpr double kTerms[] = {0x1.5d87fe908f88ap-10, 0x1.3b2ab6fba385fp-7, 0x1.c6b08d7044119p-5,
                                 0x1.ebfbdff82c590p-3,  0x1.62e42fefa39f7p-1, 1.0};
    auto p = hn::Set(d, 0x1.e5e9f548e5725p-28);
    for (const double term : {0x1.b6571de2f2351p-24, 0x1.62bfe46117445p-20, 0x1.ffcb76789860fp-17,
                              0x1.4309130378460p-13}) {
      p = hn::MulAdd(p, f, hn::Set(d, term));
    }
    for (const double term : kTerms) p = hn::MulAdd(p, f, hn::Set(d, term));
    return hn::BitCast(d, hn::Add(hn::BitCast(bits, p), hn::ShiftLeft<52>(hn::BitCast(bits, sum))));
  }
  // The same for one, with the same bits.
  HWY_INLINE double operator()(float logit) const {
    return hn::GetLane((*this)(hn::Set(DH(), logit)));
  }

 private:
  double top_, per_unit_, lowest_;
};

template <typename D>
HWY_INLINE auto buckets_of(D d, hn::Vec<D> logits, const LogitBuckets& b) {
  const auto at = hn::Mul(hn::Sub(hn::Set(d, b.first), logits), hn::Set(d, b.scale));
  const hn::RebindToSigned<D> di;
  return hn::ConvertTo(di, hn::Min(at, hn::Set(d, float{kLogitBuckets - 1})));
}

double add_weights(std::span<const float> logits, const LogitWeights& weights,
                   const LogitBuckets& buckets, double least, double (&mass)[kLogitBuckets]) {
  const DF df;
  const DD d;
  const Weigher weight_of(weights);
  const float* const x = logits.data();
  // A bucket's sum is kept in several parts, in turn, so that logits of one bucket do not wait for
  // each other.
  constexpr int kShift = 2;
  constexpr int64_t kParts = 1 << kShift, kAtOnce = 256;
  double part[kLogitBuckets * kParts] = {};
  double block_weights[kAtOnce + kGatherPadding];
  int32_t sums[kAtOnce + kGatherPadding];  // where a bucket's parts begin
  const auto limit = hn::Set(d, least);
  auto kept = hn::Zero(d);
  double rest = 0.0;
  for (int64_t first = 0; first < std::ssize(logits); first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, std::ssize(logits) - first);
    for_each_logit(
        df, count,
        [&](int64_t at) {
          const auto bucket = buckets_of(df, hn::LoadU(df, x + first + at), buckets);
          hn::StoreU(hn::ShiftLeft<kShift>(bucket), hn::RebindToSigned<DF>(), sums + at);
        },
        [&](int64_t at) {
          sums[at] = hn::GetLane(buckets_of(df, hn::Set(df, x[first + at]), buckets)) << kShift;
        });
    for_each_logit(
        DH(), count,
        [&](int64_t at) {
          const auto weight = weight_of(hn::LoadU(DH(), x + first + at));
          kept = hn::Add(kept, hn::IfThenElseZero(hn::Ge(weight, limit), weight));
          hn::StoreU(weight, d, block_weights + at);
        },
        [&](int64_t at) {
          block_weights[at] = weight_of(x[first + at]);
          if (block_weights[at] >= least) rest += block_weights[at];
        });
    int64_t i = 0;
    for (; i + kParts <= count; i += kParts) {
      for (int64_t k = 0; k < kParts; ++k) part[sums[i + k] + k] += block_weights[i + k];
    }
    for (; i < count; ++i) part[sums[i]] += block_weights[i];
  }
  for (int32_t b = 0; b < kLogitBuckets; ++b) {
    const double* const of = part + b * kParts;
    mass[b] += of[0] + of[1] + of[2] + of[3];
  }
  return hn::GetLane(hn::SumOfLanes(d, kept)) + rest;
}

template <typename D, typename Wanted>
HWY_INLINE int64_t gather(D d, std::span<const float> logits, int32_t* positions,
                          const Wanted& wanted) {
  const hn::Rebind<int32_t, D> di;
  const float* const x = logits.data();
  int64_t found = 0;
  for_each_logit(
      d, std::ssize(logits),
      [&](int64_t at) {
        const auto mask = wanted(hn::LoadU(d, x + at));
        if (hn::AllFalse(di, mask)) return;
        found += static_cast<int64_t>(
            hn::CompressStore(hn::Iota(di, static_cast<int32_t>(at)), mask, di, positions + found));
      },
      [&](int64_t at) {
        if (hn::FindFirstTrue(di, wanted(hn::Set(d, x[at]))) == 0) {
          positions[found++] = static_cast<int32_t>(at);
        }
      });
  return found;
}

int64_t gather_equal(std::span<const float> logits, const LogitBuckets& buckets, int32_t bucket,
                     int32_t* positions) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  return gather(d, logits, positions,
                [&](auto v) { return hn::Eq(buckets_of(d, v, buckets), hn::Set(di, bucket)); });
}

int64_t gather_least(std::span<const float> logits, float lowest, int32_t* positions) {
  const DF d;
  return gather(d, logits, positions, [&](auto v) {
    return hn::RebindMask(hn::Rebind<int32_t, DF>(), hn::Ge(v, hn::Set(d, lowest)));
  });
}

void weigh_all(std::span<const float> logits, const LogitWeights& weights, double* to) {
  const Weigher weight_of(weights);
  const float* const x = logits.data();
  for_each_logit(
      DH(), std::ssize(logits),
      [&](int64_t at) { hn::StoreU(weight_of(hn::LoadU(DH(), x + at)), DD(), to + at); },
      [&](int64_t at) { to[at] = weight_of(x[at]); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
HWY_EXPORT(range_of);
HWY_EXPORT(position_of);
HWY_EXPORT(add_weights);
HWY_EXPORT(gather_equal);
HWY_EXPORT(gather_least);
HWY_EXPORT(weigh_all);

LogitRange logit_range(std::span<const float> logits) {
  return HWY_DYNAMIC_DISPATCH(range_of)(logits);
}

int64_t first_of(std::span<const float> logits, float value) {
  return HWY_DYNAMIC_DISPATCH(position_of)(logits, value);
}

double add_to_buckets(std::span<const float> logits, const LogitWeights& weights,
                      const LogitBuckets& buckets, double least, double (&mass)[kLogitBuckets]) {
  return HWY_DYNAMIC_DISPATCH(add_weights)(logits, weights, buckets, least, mass);
}

int64_t gather_bucket(std::span<const float> logits, const LogitBuckets& buckets, int32_t bucket,
                      int32_t* positions) {
  return HWY_DYNAMIC_DISPATCH(gather_equal)(logits, buckets, bucket, positions);
}

int64_t gather_from(std::span<const float> logits, float lowest, int32_t* positions) {
  return HWY_DYNAMIC_DISPATCH(gather_least)(logits, lowest, positions);
}

void weigh(std::span<const float> logits, const LogitWeights& weights, double* to) {
  HWY_DYNAMIC_DISPATCH(weigh_all)(logits, weights, to);
}

}  // namespace twell
#endif  // HWY_ONCE
