// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/sampler_simd.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
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

void adjust(std::span<float> logits, std::span<const SeenToken> seen, const Penalties& penalties,
            float* before) {
  const DH df;
  const DD d;
  const hn::RebindToSigned<DH> di;
  constexpr size_t kAtOnce = 64;
  float x[kAtOnce] = {}, bias[kAtOnce] = {};
  int32_t times[kAtOnce] = {};
  const auto repetition = hn::Set(df, penalties.repetition);
  const auto frequency = hn::Set(d, penalties.frequency), presence = hn::Set(d, penalties.presence);
  for (size_t first = 0; first < seen.size(); first += kAtOnce) {
    const auto some = seen.subspan(first, std::min(kAtOnce, seen.size() - first));
    for (size_t i = 0; i < some.size(); ++i) {
      const bool outside = some[i].id >= std::ssize(logits);
      x[i] = outside ? 0.0f : logits[static_cast<size_t>(some[i].id)];
      before[first + i] = x[i];
      times[i] = some[i].times;
      bias[i] = some[i].bias;
    }
    for (size_t i = 0; i < some.size(); i += hn::Lanes(df)) {
      const auto logit = hn::LoadU(df, x + i);
      const auto count = hn::LoadU(di, times + i);
      const auto favour = hn::LoadU(df, bias + i);
      const auto scaled = hn::IfThenElse(hn::Gt(logit, hn::Zero(df)), hn::Div(logit, repetition),
                                         hn::Mul(logit, repetition));
      const auto is_known = hn::RebindMask(df, hn::Gt(count, hn::Set(di, -1)));
      auto value = hn::IfThenElse(is_known, scaled, logit);
      const auto taken = hn::MulAdd(frequency, hn::PromoteTo(d, count), presence);
      const auto reduced = hn::DemoteTo(df, hn::Sub(hn::PromoteTo(d, value), taken));
      value = hn::IfThenElse(hn::RebindMask(df, hn::Gt(count, hn::Zero(di))), reduced, value);
      const auto biased =
          hn::DemoteTo(df, hn::Add(hn::PromoteTo(d, value), hn::PromoteTo(d, favour)));
      value = hn::IfThenElse(hn::Eq(favour, hn::Zero(df)), value, biased);
      hn::StoreU(value, df, x + i);
    }
    for (size_t i = 0; i < some.size(); ++i) {
      if (some[i].id < std::ssize(logits)) logits[static_cast<size_t>(some[i].id)] = x[i];
    }
  }
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

// keeps: least is above 0.
template <bool keeps>
double add_weights_above(std::span<const float> logits, const LogitWeights& weights,
                         const LogitBuckets& buckets, double least, double (&mass)[kLogitBuckets]) {
  const DF df;
  const DD d;
  const hn::Rebind<uint16_t, DF> d16;
  const Weigher weight_of(weights);
  const float* const x = logits.data();
  // A bucket's sum is kept in several parts, in turn, so that logits of one bucket do not wait for
  // each other.
  constexpr int kShift = 2;
  constexpr int64_t kParts = 1 << kShift, kAtOnce = 256;
  double part[kLogitBuckets * kParts] = {};
  static_assert(std::size(part) <= 65'536);
  double block_weights[kAtOnce + kGatherPadding];
  uint16_t sums[kAtOnce + kGatherPadding];  // where the parts of each logit's bucket begin
  const auto limit = hn::Set(d, least);
  auto kept = hn::Zero(d);
  double rest = 0.0;
  for (int64_t first = 0; first < std::ssize(logits); first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, std::ssize(logits) - first);
    for_each_logit(
        df, count,
        [&](int64_t at) {
          const auto bucket = buckets_of(df, hn::LoadU(df, x + first + at), buckets);
          hn::StoreU(hn::DemoteTo(d16, hn::ShiftLeft<kShift>(bucket)), d16, sums + at);
        },
        [&](int64_t at) {
          const int32_t bucket = hn::GetLane(buckets_of(df, hn::Set(df, x[first + at]), buckets));
          sums[at] = static_cast<uint16_t>(bucket << kShift);
        });
    for_each_logit(
        DH(), count,
        [&](int64_t at) {
          const auto weight = weight_of(hn::LoadU(DH(), x + first + at));
          if (keeps) kept = hn::Add(kept, hn::IfThenElseZero(hn::Ge(weight, limit), weight));
          hn::StoreU(weight, d, block_weights + at);
        },
        [&](int64_t at) {
          block_weights[at] = weight_of(x[first + at]);
          if (keeps && block_weights[at] >= least) rest += block_weights[at];
        });
    // Four numbers of parts are loaded as one, which takes two thirds of the time.
    static_assert(kParts == 4 && std::endian::native == std::endian::little);
    int64_t i = 0;
    for (; i + kParts <= count; i += kParts) {
      uint64_t four;
      std::memcpy(&four, sums + i, sizeof(four));
      part[four & 0xffff] += block_weights[i];
      part[((four >> 16) & 0xffff) + 1] += block_weights[i + 1];
      part[((four >> 32) & 0xffff) + 2] += block_weights[i + 2];
      part[(four >> 48) + 3] += block_weights[i + 3];
    }
    for (; i < count; ++i) part[sums[i]] += block_weights[i];
  }
  double total = 0.0;
  for (int32_t b = 0; b < kLogitBuckets; ++b) {
    const double* const of = part + b * kParts;
    const double sum = of[0] + of[1] + of[2] + of[3];
    mass[b] += sum;
    total += sum;
  }
  return keeps ? hn::GetLane(hn::SumOfLanes(d, kept)) + rest : total;
}

double add_weights(std::span<const float> logits, const LogitWeights& weights,
                   const LogitBuckets& buckets, double least, double (&mass)[kLogitBuckets]) {
  return least > 0.0 ? add_weights_above<true>(logits, weights, buckets, least, mass)
                     : add_weights_above<false>(logits, weights, buckets, least, mass);
}

template <typename D, typename Wanted>
HWY_INLINE int64_t gather(D d, std::span<const float> logits, int32_t* positions,
                          const Wanted& wanted) {
  const hn::Rebind<int32_t, D> di;
  const float* const x = logits.data();
  const auto first = hn::Iota(di, 0);
  int64_t found = 0;
  for_each_logit(
      d, std::ssize(logits),
      [&](int64_t at) {
        const auto mask = wanted(hn::LoadU(d, x + at));
        if (hn::AllFalse(di, mask)) return;
        found += static_cast<int64_t>(hn::CompressStore(
            hn::Add(first, hn::Set(di, static_cast<int32_t>(at))), mask, di, positions + found));
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
HWY_EXPORT(adjust);
HWY_EXPORT(position_of);
HWY_EXPORT(add_weights);
HWY_EXPORT(gather_equal);
HWY_EXPORT(gather_least);
HWY_EXPORT(weigh_all);

LogitRange logit_range(std::span<const float> logits) {
  return HWY_DYNAMIC_DISPATCH(range_of)(logits);
}

void adjust_logits(std::span<float> logits, std::span<const SeenToken> seen,
                   const Penalties& penalties, float* before) {
  HWY_DYNAMIC_DISPATCH(adjust)(logits, seen, penalties, before);
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
