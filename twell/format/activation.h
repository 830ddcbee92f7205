// SPDX-License-Identifier: Apache-2.0
// The activation function f of a feed-forward layer: h = f(x w_gate^T) * (x w_up^T), or f(x w_up^T)
// without a gate. ReLU and its relatives make exact zeros; layers with another one run dense. A
// neuron of theirs is active on a token where f does not make it 0. The L1 term of training is on
// |h| for every activation.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace twell {

enum class Activation {
  kRelu,       // max(x, 0)
  kSilu,       // x sigmoid(x)
  kGelu,       // x Phi(x), Phi the standard normal distribution
  kGeluTanh,   // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  kQuickGelu,  // x sigmoid(1.702 x)
  kRelu2,      // max(x, 0)^2
  kFatRelu,    // x above a threshold that the model gives, 0 up to it
  kDRelu,      // max(x, 0), and the up projection goes through a ReLU too; gated layers only
};
inline constexpr Activation kActivations[] = {
    Activation::kRelu,      Activation::kSilu,  Activation::kGelu,    Activation::kGeluTanh,
    Activation::kQuickGelu, Activation::kRelu2, Activation::kFatRelu, Activation::kDRelu};

// Whether f is exactly 0 for all x <= 0.
constexpr bool leaves_zeros(Activation activation) {
  return activation == Activation::kRelu || activation == Activation::kRelu2 ||
         activation == Activation::kFatRelu || activation == Activation::kDRelu;
}

// Hugging Face's name: "relu", "silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu2",
// "fatrelu"; and "drelu", which has none there.
std::string_view activation_name(Activation activation);
// Any of transformers' names for the above; InputError names `source` and lists them.
Activation parse_activation(std::string_view name, const std::string& source);

// relu_share * relu(x) + (1 - relu_share) * kind(x): a layer in transition from `kind` to ReLU.
struct BlendedActivation {
  Activation kind = Activation::kRelu;
  float relu_share = 0.0f;  // in [0, 1]; 0 or 1 unless `kind` leaves no zeros
  float threshold = 0.0f;   // of kFatRelu, not negative

  bool is_whole_relu() const { return kind == Activation::kRelu || relu_share >= 1.0f; }
  bool is_relu2() const { return kind == Activation::kRelu2 && !is_whole_relu(); }
  // h is max(x, 0) * max(u, 0).
  bool is_drelu() const { return kind == Activation::kDRelu && !is_whole_relu(); }
  // f(x) is x or 0.
  bool is_relu() const {
    return is_whole_relu() || kind == Activation::kFatRelu || kind == Activation::kDRelu;
  }
  bool leaves_zeros() const { return is_relu() || is_relu2(); }
  // Where zeros are left, f is 0 exactly for the x up to this.
  float zero_up_to() const {
    return kind == Activation::kFatRelu && !is_whole_relu() ? threshold : 0.0f;
  }
};

// The largest bf16 value, as bits, that FATReLU makes 0, for kernels that compare gates as bits.
constexpr uint32_t bf16_cut(Activation activation, float threshold) {
  return activation == Activation::kFatRelu ? std::bit_cast<uint32_t>(threshold) >> 16 : 0;
}

}  // namespace twell
