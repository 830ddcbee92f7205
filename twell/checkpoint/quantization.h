// SPDX-License-Identifier: Apache-2.0
// Weights in 8 bits in checkpoints, as compressed-tensors writes them, so that vLLM and
// transformers read ours and we read theirs. config.json has a quantization_config with
//   quant_method "compressed-tensors", format "float-quantized" (e4m3) or "int-quantized" (int8),
//   one group: weights of 8 bits, symmetric, strategy "channel"; input activations of 8 bits,
//   symmetric, dynamic, strategy "token"; targets ["Linear"]; ignore ["lm_head"]
// and each projection X of a layer is stored as
//   X.weight        F8_E4M3 or I8 [outputs, inputs]
//   X.weight_scale  F32, BF16 or F16 [outputs, 1]
// Norms, biases, the embedding and the output head are floats as ever.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "twell/base/json_fields.h"
#include "twell/format/byte_matrix.h"
#include "twell/model/weights.h"

namespace twell {

// The type of the projections' weights; none where config.json has no quantization_config.
// InputError names the first part of another scheme.
std::optional<ByteType> parse_quantization(const JsonFields& config);
// The value of quantization_config.
nlohmann::ordered_json quantization_to_json(ByteType type);

// Whether this parameter is stored in 8 bits in such a checkpoint: the projections of layers.
bool is_projection(const ParamSpec& spec);
// "X.weight_scale" of "X.weight".
std::string scale_name(const std::string& weight_name);

// "fp8", "int8".
ByteType parse_byte_type(std::string_view name);
std::string_view byte_option_name(ByteType type);

}  // namespace twell
