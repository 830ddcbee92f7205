// SPDX-License-Identifier: Apache-2.0
// The activations of format/activation.h on the device, in f32.
#pragma once

#include "twell/format/activation.h"

namespace twell {

// threshold: of FATReLU.
template <Activation kActivation>
__device__ float activate(float x, float threshold) {
  if constexpr (kActivation == Activation::kRelu || kActivation == Activation::kDRelu) {
    return x <= 0.0f ? 0.0f : x;  // a NaN stays
  }
  if constexpr (kActivation == Activation::kFatRelu) return x <= threshold ? 0.0f : x;
  if constexpr (kActivation == Activation::kRelu2) return x <= 0.0f ? 0.0f : x * x;
  if constexpr (kActivation == Activation::kSilu) return x / (1.0f + expf(-x));
  if constexpr (kActivation == Activation::kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  }
  return x / (1.0f + expf(-1.702f * x));  // quick GELU
}

}  // namespace twell
