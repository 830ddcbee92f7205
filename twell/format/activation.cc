// SPDX-License-Identifier: Apache-2.0
#include "twell/format/activation.h"

#include "twell/base/error.h"

namespace twell {
namespace {

struct Name {
  std::string_view text;
  Activation activation;
};

// The first name of each activation is the one that is written. The variants in transformers
// compute the same function in different ways.
constexpr Name kNames[] = {{"relu", Activation::kRelu},
                           {"silu", Activation::kSilu},
                           {"swish", Activation::kSilu},
                           {"gelu", Activation::kGelu},
                           {"gelu_python", Activation::kGelu},
                           {"gelu_pytorch_tanh", Activation::kGeluTanh},
                           {"gelu_python_tanh", Activation::kGeluTanh},
                           {"gelu_new", Activation::kGeluTanh},
                           {"gelu_fast", Activation::kGeluTanh},
                           {"gelu_accurate", Activation::kGeluTanh},
                           {"quick_gelu", Activation::kQuickGelu},
                           {"relu2", Activation::kRelu2},
                           {"fatrelu", Activation::kFatRelu},
                           {"drelu", Activation::kDRelu}};

}  // namespace

std::string_view activation_name(Activation activation) {
  for (const Name& name : kNames) {
    if (name.activation == activation) return name.text;
  }
  throw_error(__FILE__, __LINE__, "an activation without a name");
}

Activation parse_activation(std::string_view text, const std::string& source) {
  std::string known;
  for (const Name& name : kNames) {
    if (name.text == text) return name.activation;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", name.text);
  }
  throw InputError(
      fmt::format("{}: activation \"{}\" is not supported; supported are {}", source, text, known));
}

}  // namespace twell
