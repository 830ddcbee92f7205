// SPDX-License-Identifier: Apache-2.0
// The activation function f of a feed-forward layer: h = f(x w_gate^T) * (x w_up^T), or f(x w_up^T)
// without a gate. ReLU and its square make exact zeros; layers with another one run dense. A neuron
// of theirs is active on a token where its ReLU is not 0. The L1 term of training is on |h| for
// every activation.
#pragma once

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
};
inline constexpr Activation kActivations[] = {Activation::kRelu,      Activation::kSilu,
                                              Activation::kGelu,      Activation::kGeluTanh,
                                              Activation::kQuickGelu, Activation::kRelu2};

// Whether f is exactly 0 for all x <= 0.
constexpr bool leaves_zeros(Activation activation) {
  return activation == Activation::kRelu || activation == Activation::kRelu2;
}

// Hugging Face's name: "relu", "silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu2".
std::string_view activation_name(Activation activation);
// Any of transformers' names for the above; InputError names `source` and lists them.
Activation parse_activation(std::string_view name, const std::string& source);

// relu_share * relu(x) + (1 - relu_share) * kind(x): a layer in transition from `kind` to ReLU.
struct BlendedActivation {
  Activation kind = Activation::kRelu;
  float relu_share = 0.0f;  // in [0, 1]

  bool is_relu() const { return kind == Activation::kRelu || relu_share >= 1.0f; }
  bool is_relu2() const { return kind == Activation::kRelu2 && relu_share == 0.0f; }
  bool leaves_zeros() const { return is_relu() || is_relu2(); }
};

}  // namespace twell
