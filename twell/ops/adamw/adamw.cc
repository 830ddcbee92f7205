// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/adamw/adamw.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "twell/base/buffer.h"
#include "twell/base/error.h"
#include "twell/ops/adamw/moment_rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/adamw/adamw.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

void update_vector(const AdamWCoefficients& c, float* w, const float* grad, float* m, float* v) {
  const D d;
  const auto g = hn::Mul(hn::LoadU(d, grad), hn::Set(d, c.grad_scale));
  const auto m_old = hn::LoadU(d, m);
  const auto m_new = hn::MulAdd(hn::Set(d, c.one_minus_beta1), hn::Sub(g, m_old), m_old);
  const auto v_decayed = hn::Mul(hn::LoadU(d, v), hn::Set(d, c.beta2));
  const auto v_new = hn::MulAdd(hn::Mul(hn::Set(d, c.one_minus_beta2), g), g, v_decayed);
  const auto denominator =
      hn::MulAdd(hn::Sqrt(v_new), hn::Set(d, c.rsqrt_correct2), hn::Set(d, c.eps));
  const auto decayed = hn::Mul(hn::LoadU(d, w), hn::Set(d, c.decay));
  const auto step = hn::Div(m_new, denominator);
  hn::StoreU(hn::NegMulAdd(hn::Set(d, c.step_size), step, decayed), d, w);
  hn::StoreU(m_new, d, m);
  hn::StoreU(v_new, d, v);
}

void update_range(const AdamWCoefficients& c, const AdamWParams& p, int64_t begin, int64_t end) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  float* const w = p.weight.data();
  const float* const g = p.grad.data();
  float* const m = p.exp_avg.data();
  float* const v = p.exp_avg_sq.data();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) update_vector(c, w + i, g + i, m + i, v + i);
  if (i == end) return;
  // The remainder uses the same instructions, so that range boundaries do not change results.
  const size_t rest = static_cast<size_t>(end - i);
  HWY_ALIGN float tail[4][hn::MaxLanes(d)] = {};
  std::memcpy(tail[0], w + i, rest * sizeof(float));
  std::memcpy(tail[1], g + i, rest * sizeof(float));
  std::memcpy(tail[2], m + i, rest * sizeof(float));
  std::memcpy(tail[3], v + i, rest * sizeof(float));
  update_vector(c, tail[0], tail[1], tail[2], tail[3]);
  std::memcpy(w + i, tail[0], rest * sizeof(float));
  std::memcpy(m + i, tail[2], rest * sizeof(float));
  std::memcpy(v + i, tail[3], rest * sizeof(float));
}

double sum_of_squares(const float* values, int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto a = hn::PromoteTo(d, hn::LoadU(df, values + i));
    const auto b = hn::PromoteTo(d, hn::LoadU(df, values + i + lanes));
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  double total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < n; ++i) total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return total;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
namespace {
HWY_EXPORT(update_range);
HWY_EXPORT(sum_of_squares);

void round_moments(int64_t step, const AdamWParams& p, int64_t begin, int64_t end) {
  PhiloxBits bits{};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t place = p.first + i, lane = place % kRoundingGroup;
    if (i == begin || lane == 0) bits = rounding_bits(p.seed, step, place / kRoundingGroup);
    const auto round = [](float& value, uint32_t random) {
      value = std::bit_cast<float>(round_stochastically(std::bit_cast<uint32_t>(value), random));
    };
    round(p.exp_avg[static_cast<size_t>(i)], bits.word[lane]);
    round(p.exp_avg_sq[static_cast<size_t>(i)], bits.word[lane] >> 16);
  }
}

constexpr int64_t kGrain = 1 << 14;      // below this a second thread costs more than it saves
constexpr int64_t kNormBlock = 1 << 14;  // 64 KiB: one partial sum, whatever the thread count
}  // namespace

AdamWCoefficients adamw_coefficients(const AdamW& options) {
  TWELL_CHECK(options.step >= 1, "AdamW counts steps from 1, got {}", options.step);
  const double step = static_cast<double>(options.step);
  const double correct1 = 1.0 - std::pow(options.beta1, step);
  const double correct2 = 1.0 - std::pow(options.beta2, step);
  return {
      .grad_scale = static_cast<float>(options.grad_scale),
      .one_minus_beta1 = static_cast<float>(1.0 - options.beta1),
      .beta2 = static_cast<float>(options.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
      .decay = static_cast<float>(1.0 - options.learning_rate * options.weight_decay),
      .step_size = static_cast<float>(options.learning_rate / correct1),
      .rsqrt_correct2 = static_cast<float>(1.0 / std::sqrt(correct2)),
      .eps = static_cast<float>(options.eps),
      .step = options.step,
  };
}

void adamw_step(Context& ctx, const AdamW& options, const AdamWParams& params) {
  const size_t n = params.weight.size();
  TWELL_CHECK(
      params.grad.size() == n && params.exp_avg.size() == n && params.exp_avg_sq.size() == n,
      "AdamW needs spans of one size, got weight {}, grad {}, exp_avg {}, exp_avg_sq {}", n,
      params.grad.size(), params.exp_avg.size(), params.exp_avg_sq.size());
  const AdamWCoefficients coefficients = adamw_coefficients(options);
  const auto update = HWY_DYNAMIC_DISPATCH(update_range);
  ctx.parallel_for(static_cast<int64_t>(n), kGrain, [&](int64_t begin, int64_t end, int) {
    update(coefficients, params, begin, end);
    if (params.round_moments) round_moments(options.step, params, begin, end);
  });
}

double global_norm(Context& ctx, std::span<const float> values) {
  const int64_t n = static_cast<int64_t>(values.size());
  const int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
  Arena::Scope scope(ctx.scratch());
  double* const partial = scope.alloc<double>(blocks);
  const auto squares = HWY_DYNAMIC_DISPATCH(sum_of_squares);
  ctx.parallel_for(blocks, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kNormBlock;
      partial[b] = squares(values.data() + first, std::min(kNormBlock, n - first));
    }
  });
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[b];
  return std::sqrt(total);
}

}  // namespace twell
#endif  // HWY_ONCE
