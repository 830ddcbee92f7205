// SPDX-License-Identifier: Apache-2.0
// Weights in 8 bits in checkpoints, as compressed-tensors writes them, so that vLLM and
// transformers read ours and we read theirs. config.json has a quantization_config with
//   quant_method "compressed-tensors", format "float-quantized" (e4m3) or "int-quantized" (int8),
//   one group: weights of 8 bits, symmetric, strategy "channel"; input activations of 8 bits,
//   symmetric, dynamic, strategy "token"; targets ["Linear"]; ignore ["lm_head"]
// and each projection X of a layer is stored as
//   X.weight        F8_E4M3 or I8 [outputs, inputs]
//   X.weight_scale  F32, BF16 or F16 [outputs, 1]
// The output head lm_head is stored so too where `ignore` does not name it; we name it in `targets`
// beside "Linear", where vLLM and SGLang look for it, and such a model's embeddings are not tied.
// Norms, biases and the embedding are floats as ever: engines read embeddings in 8 bits in another,
// packed format only, or not at all.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "twell/base/json_fields.h"
#include "twell/format/byte_matrix.h"
#include "twell/model/weights.h"

namespace twell {

// None where config.json has no quantization_config. InputError names the first part of another
// scheme.
std::optional<ByteWeights> parse_quantization(const JsonFields& config);
// The value of quantization_config.
nlohmann::ordered_json quantization_to_json(ByteWeights weights);

// The projections of layers, which are stored in 8 bits in such a checkpoint, and the output head,
// which may be. A tied model has no parameter for its head.
bool is_projection(const ParamSpec& spec);
bool is_head(const ParamSpec& spec);
// "X.weight_scale" of "X.weight".
std::string scale_name(const std::string& weight_name);

// "fp8", "int8".
ByteType parse_byte_type(std::string_view name);
std::string_view byte_option_name(ByteType type);

}  // namespace twell
