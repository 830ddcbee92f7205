// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "twell/base/error.h"
#include "twell/ops/activation/activation_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "twell/ops/activation/activation_rows_simd.cc"
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace twell {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The smooth activations are x * s(x) with a step s from 0 to 1, so f' = s + x s'.
template <class V>
struct Step {
  V s;
  V slope;
};

// s = sigmoid(z), slope = s (1 - s). Computed from exp(-|z|), which cannot overflow and keeps the
// relative precision of both tails.
template <class D, class V = hn::Vec<D>>
Step<V> sigmoid(D d, V z) {
  const V one = hn::Set(d, 1.0f);
  const V e = hn::Exp(d, hn::Neg(hn::Abs(z)));
  const V larger = hn::Div(one, hn::Add(one, e));
  const V smaller = hn::Mul(e, larger);
  return {hn::IfThenElse(hn::Lt(z, hn::Zero(d)), smaller, larger), hn::Mul(larger, smaller)};
}

struct Silu {
  template <class D, class V = hn::Vec<D>>
  Step<V> operator()(D d, V x) const {
    return sigmoid(d, x);
  }
};

struct QuickGelu {
  template <class D, class V = hn::Vec<D>>
  Step<V> operator()(D d, V x) const {
    const V scale = hn::Set(d, 1.702f);
    const Step<V> step = sigmoid(d, hn::Mul(scale, x));
    return {step.s, hn::Mul(scale, step.slope)};
  }
};

// 0.5 (1 + tanh(z)) = sigmoid(2 z), with 2 z = a x + b x^3.
struct GeluTanh {
  template <class D, class V = hn::Vec<D>>
  Step<V> operator()(D d, V x) const {
    constexpr float kA = 1.5957691216f;  // 2 sqrt(2 / pi)
    constexpr float kB = 0.044715f * kA;
    // Beyond 32 the step is exactly 0 or 1, and x is clamped so that the cube cannot overflow.
    const V limit = hn::Set(d, 32.0f);
    const V near = hn::Clamp(x, hn::Neg(limit), limit);
    const V square = hn::Mul(near, near);
    const V a = hn::Set(d, kA);
    const Step<V> step = sigmoid(d, hn::Mul(near, hn::MulAdd(square, hn::Set(d, kB), a)));
    return {step.s, hn::Mul(step.slope, hn::MulAdd(square, hn::Set(d, 3.0f * kB), a))};
  }
};

// s = Phi(x) = erfc(-x / sqrt(2)) / 2. erfc(z) for z >= 0 is t exp(-z^2 + p(t)), t = 1 / (1 + z/2),
// with the Chebyshev fit of Numerical Recipes (relative error below 1.2e-7).
struct Gelu {
  template <class D, class V = hn::Vec<D>>
  Step<V> operator()(D d, V x) const {
    constexpr float kFit[] = {-1.26551223f, 1.00002368f,  0.37409196f, 0.09678418f,  -0.18628806f,
                              0.27886807f,  -1.13520398f, 1.48851587f, -0.82215223f, 0.17087277f};
    const V half = hn::Set(d, 0.5f), one = hn::Set(d, 1.0f);
    const V z = hn::Mul(hn::Abs(x), hn::Set(d, 0.70710678f));
    const V t = hn::Div(one, hn::MulAdd(z, half, one));
    V p = hn::Set(d, kFit[9]);
    for (int i = 8; i >= 0; --i) p = hn::MulAdd(p, t, hn::Set(d, kFit[i]));
    const V tail = hn::Mul(hn::Mul(half, t), hn::Exp(d, hn::NegMulAdd(z, z, p)));
    const V density =
        hn::Mul(hn::Set(d, 0.39894228f), hn::Exp(d, hn::Mul(hn::Mul(x, x), hn::Neg(half))));
    return {hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail)), density};
  }
};

// f is exactly 0 where x <= cutoff, so that a neuron is active where not x <= cutoff: a NaN is. Not
// blended.
template <bool kBoth>  // u goes through a ReLU too
struct CutRelu {
  float cutoff;
};
using Relu = CutRelu<false>;
using DRelu = CutRelu<true>;
struct Relu2 {
  static constexpr float cutoff = 0.0f;
};
template <class F>
constexpr bool kLeavesZeros =
    std::is_same_v<F, Relu> || std::is_same_v<F, DRelu> || std::is_same_v<F, Relu2>;

// What h is a multiple of beside f(x).
template <class F, class D, class V = hn::Vec<D>>
V factor(D d, V u) {
  if constexpr (std::is_same_v<F, DRelu>) return hn::IfThenZeroElse(hn::Le(u, hn::Zero(d)), u);
  return u;
}

// f(x) and f'(x) of the blend.
template <class D, class F, class V = hn::Vec<D>>
Step<V> blended(D d, const F& f, float relu_share, V x) {
  const Step<V> step = f(d, x);
  const V value = hn::Mul(x, step.s), slope = hn::MulAdd(x, step.slope, step.s);
  if (relu_share == 0.0f) return {value, slope};
  const V share = hn::Set(d, relu_share), rest = hn::Set(d, 1.0f - relu_share);
  const auto fires = hn::Gt(x, hn::Zero(d));
  return {hn::MulAdd(rest, value, hn::IfThenElseZero(fires, hn::Mul(share, x))),
          hn::MulAdd(rest, slope, hn::IfThenElseZero(fires, share))};
}

template <class D, bool kBoth, class V = hn::Vec<D>>
Step<V> blended(D d, const CutRelu<kBoth>& f, float, V x) {
  const auto off = hn::Le(x, hn::Set(d, f.cutoff));
  return {hn::IfThenZeroElse(off, x), hn::IfThenZeroElse(off, hn::Set(d, 1.0f))};
}

template <class D, class V = hn::Vec<D>>
Step<V> blended(D d, const Relu2&, float, V x) {
  const V g = hn::IfThenZeroElse(hn::Le(x, hn::Zero(d)), x);
  return {hn::Mul(g, g), hn::Add(g, g)};
}

// The neurons that count as active, given f(x).
template <class D, class F, class V = hn::Vec<D>>
hn::Mask<D> active(D d, const F& f, float relu_share, V x, V value) {
  if constexpr (kLeavesZeros<F>) return hn::Not(hn::Le(x, hn::Set(d, f.cutoff)));
  return relu_share > 0.0f ? hn::Gt(x, hn::Zero(d)) : hn::Ne(value, hn::Zero(d));
}

// Every step is written once over a tag, which is the full vector and then, for the rest of a row,
// a single lane. The sums of |h| are widened to double every kWiden vectors.
template <class F>
ActivatedRow forward_row(const F& f, float relu_share, const float* x, const float* u, float* h,
                         float* fired, int64_t n) {
  constexpr int64_t kWiden = 16;
  const hn::ScalableTag<float> full;
  const hn::CappedTag<float, 1> single;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(full));
  size_t nnz = 0;
  const auto step = [&](auto d, int64_t i, auto& l1) HWY_ATTR {
    const auto v = hn::LoadU(d, x + i);
    const auto value = blended(d, f, relu_share, v).s;
    const auto on = active(d, f, relu_share, v, value);
    auto product = u == nullptr ? value : hn::Mul(value, factor<F>(d, hn::LoadU(d, u + i)));
    // 0 whatever u is, as in executions that never compute u of neurons that are not active.
    if (kLeavesZeros<F>) product = hn::IfThenElseZero(on, product);
    hn::StoreU(product, d, h + i);
    if (fired != nullptr) {
      hn::StoreU(hn::IfThenElse(on, hn::Set(d, 1.0f), hn::LoadU(d, fired + i)), d, fired + i);
    }
    l1 = hn::Add(l1, hn::Abs(product));
    nnz += hn::CountTrue(d, on);
  };
  double l1 = 0.0;
  int64_t i = 0;
  while (i + lanes <= n) {
    auto sum = hn::Zero(full);
    for (int64_t k = 0; k < kWiden && i + lanes <= n; ++k, i += lanes) step(full, i, sum);
    l1 += static_cast<double>(hn::GetLane(hn::SumOfLanes(full, sum)));
  }
  for (; i < n; ++i) {
    auto sum = hn::Zero(single);
    step(single, i, sum);
    l1 += static_cast<double>(hn::GetLane(sum));
  }
  return {static_cast<int64_t>(nnz), l1};
}

template <class D, class F>
void backward_step(D d, const F& f, float relu_share, const ActivationBackwardRow& row, int64_t i) {
  const auto zero = hn::Zero(d);
  const auto step = blended(d, f, relu_share, hn::LoadU(d, row.x + i));
  const auto up = row.u == nullptr ? hn::Set(d, 1.0f) : factor<F>(d, hn::LoadU(d, row.u + i));
  const auto h = hn::Mul(step.s, up);
  const auto sign = hn::IfThenElse(hn::Eq(h, zero), zero, hn::CopySign(hn::Set(d, 1.0f), h));
  const auto gradient = hn::MulAdd(hn::Set(d, row.l1), sign, hn::LoadU(d, row.d_h + i));
  if (row.h != nullptr) hn::StoreU(h, d, row.h + i);
  if (row.d_u != nullptr) {
    auto d_u = hn::Mul(gradient, step.s);
    if constexpr (std::is_same_v<F, DRelu>) d_u = hn::IfThenZeroElse(hn::Eq(up, zero), d_u);
    hn::StoreU(d_u, d, row.d_u + i);
  }
  const auto d_x = hn::Mul(hn::Mul(gradient, up), step.slope);
  hn::StoreU(hn::IfThenZeroElse(hn::Eq(step.slope, zero), d_x), d, row.d_h + i);
}

template <class F>
void backward_row(const F& f, float relu_share, const ActivationBackwardRow& row, int64_t n) {
  const hn::ScalableTag<float> full;
  const hn::CappedTag<float, 1> single;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(full));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) backward_step(full, f, relu_share, row, i);
  for (; i < n; ++i) backward_step(single, f, relu_share, row, i);
}

// Calls use() with the function object of the activation.
template <class Use>
auto with_function(const BlendedActivation& f, const Use& use) {
  if (f.is_drelu()) return use(DRelu{0.0f});
  if (f.is_relu()) return use(Relu{f.zero_up_to()});
  switch (f.kind) {
    case Activation::kSilu:
      return use(Silu());
    case Activation::kGelu:
      return use(Gelu());
    case Activation::kGeluTanh:
      return use(GeluTanh());
    case Activation::kRelu2:
      return use(Relu2());
    default:
      return use(QuickGelu());
  }
}

ActivatedRow forward(const BlendedActivation& f, const float* x, const float* u, float* h,
                     float* fired, int64_t n) {
  return with_function(f, [&](const auto& function) HWY_ATTR {
    return forward_row(function, f.relu_share, x, u, h, fired, n);
  });
}

void backward(const BlendedActivation& f, const ActivationBackwardRow& row, int64_t n) {
  with_function(
      f, [&](const auto& function) HWY_ATTR { backward_row(function, f.relu_share, row, n); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twell
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twell {
namespace {

HWY_EXPORT(forward);
HWY_EXPORT(backward);

void check(const BlendedActivation& f) {
  TWELL_CHECK(f.relu_share >= 0.0f && f.relu_share <= 1.0f, "a ReLU share of {}", f.relu_share);
  TWELL_CHECK(!leaves_zeros(f.kind) || f.relu_share == 0.0f, "{} is not blended",
              activation_name(f.kind));
  TWELL_CHECK(f.threshold >= 0.0f, "a threshold of {}", f.threshold);
}

}  // namespace

ActivatedRow activate_row(const BlendedActivation& f, const float* x, const float* u, float* h,
                          float* fired, int64_t n) {
  check(f);
  return HWY_DYNAMIC_DISPATCH(forward)(f, x, u, h, fired, n);
}

void activate_backward_row(const BlendedActivation& f, const ActivationBackwardRow& row,
                           int64_t n) {
  check(f);
  HWY_DYNAMIC_DISPATCH(backward)(f, row, n);
}

}  // namespace twell
#endif  // HWY_ONCE
