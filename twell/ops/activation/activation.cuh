// SPDX-License-Identifier: Apache-2.0
// The activations of format/activation.h on the device, with their slopes, in f32.
#pragma once

#include "twell/format/activation.h"

namespace twell {

struct Activated {
  float value;  // f(x)
  float slope;  // f'(x)
  bool active;  // as in activation_rows.h
};

// leaves_zeros() as a constant, which device code may use.
template <Activation kKind>
inline constexpr bool kLeavesZeros = leaves_zeros(kKind);

namespace activation {

// The smooth activations are x * s(x) with a step s from 0 to 1, so f' = s + x s'.
struct Step {
  float s, slope;
};

// s = sigmoid(z), slope = s (1 - s), from exp(-|z|), which cannot overflow.
__device__ __forceinline__ Step sigmoid(float z) {
  const float e = expf(-fabsf(z));
  const float larger = 1.0f / (1.0f + e), smaller = e * larger;
  return {z < 0.0f ? smaller : larger, larger * smaller};
}

template <Activation kKind>
__device__ __forceinline__ Step step(float x) {
  if constexpr (kKind == Activation::kSilu) return sigmoid(x);
  if constexpr (kKind == Activation::kGelu) {
    return {0.5f * erfcf(-0.70710678f * x), 0.39894228f * expf(-0.5f * x * x)};
  }
  if constexpr (kKind == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(z)) = sigmoid(2 z), 2 z = a x + b x^3. Beyond 32 the step is 0 or 1, and x is
    // clamped so that the cube cannot overflow.
    constexpr float kA = 1.5957691216f, kB = 0.044715f * kA;
    const float near = x > 32.0f ? 32.0f : (x < -32.0f ? -32.0f : x);  // a NaN stays
    const Step out = sigmoid(near * (kA + kB * near * near));
    return {out.s, out.slope * (kA + 3.0f * kB * near * near)};
  }
  const Step out = sigmoid(1.702f * x);  // quick GELU
  return {out.s, 1.702f * out.slope};
}

}  // namespace activation

// threshold: of fatrelu. relu_share: of a blend with ReLU, 0 where kKind leaves zeros.
template <Activation kKind>
__device__ __forceinline__ Activated activated(float x, float threshold, float relu_share) {
  if constexpr (kLeavesZeros<kKind>) {
    const bool active = !(x <= (kKind == Activation::kFatRelu ? threshold : 0.0f));  // a NaN is
    const float kept = active ? x : 0.0f;
    if constexpr (kKind == Activation::kRelu2) return {kept * kept, 2.0f * kept, active};
    return {kept, active ? 1.0f : 0.0f, active};
  }
  const activation::Step step = activation::step<kKind>(x);
  const float value = x * step.s, slope = fmaf(x, step.slope, step.s);
  if (relu_share == 0.0f) return {value, slope, value != 0.0f};
  const bool fires = x > 0.0f;
  const float rest = 1.0f - relu_share;
  return {fmaf(rest, value, fires ? relu_share * x : 0.0f),
          fmaf(rest, slope, fires ? relu_share : 0.0f), fires};
}

// What h is a multiple of beside f(g).
template <Activation kKind>
__device__ __forceinline__ float up_factor(float u) {
  if constexpr (kKind == Activation::kDRelu) return u <= 0.0f ? 0.0f : u;
  return u;
}

// Calls use.operator()<kKind>() for this kind.
template <typename Use>
auto with_activation(Activation kind, const Use& use) {
  switch (kind) {
    case Activation::kSilu:
      return use.template operator()<Activation::kSilu>();
    case Activation::kGelu:
      return use.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return use.template operator()<Activation::kGeluTanh>();
    case Activation::kQuickGelu:
      return use.template operator()<Activation::kQuickGelu>();
    case Activation::kRelu2:
      return use.template operator()<Activation::kRelu2>();
    case Activation::kFatRelu:
      return use.template operator()<Activation::kFatRelu>();
    case Activation::kDRelu:
      return use.template operator()<Activation::kDRelu>();
    case Activation::kRelu:
      break;
  }
  return use.template operator()<Activation::kRelu>();
}

}  // namespace twell
