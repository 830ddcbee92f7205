// SPDX-License-Identifier: Apache-2.0
// config.json, the model configuration as Hugging Face writes it. Families: Llama, Mistral, Qwen2,
// Qwen3, and the published sparse layouts llama_sparse_relu and qwen2_sparse_relu.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "twell/base/dtype.h"
#include "twell/format/byte_matrix.h"
#include "twell/model/config.h"

namespace twell {

// InputError names `source` and the first architecture, activation, option or key that is not
// supported.
ModelConfig parse_config(const nlohmann::json& json, const std::string& source);
ModelConfig parse_config_text(std::string_view text, const std::string& source);

// What config.json says is stored in 8 bits (quantization.h).
std::optional<ByteWeights> parse_weight_bytes(std::string_view text, const std::string& source);

// A configuration that transformers opens with the family's own class. "mlp_gated": false marks a
// model that is not gated; only TwELL understands this key.
nlohmann::json config_to_json(const ModelConfig& config);
// The same as file text, with the dtype of the weights (torch_dtype).
std::string config_to_text(const ModelConfig& config, DType dtype);

enum class CheckpointLayout {
  kKeep,
  // The family's own class in transformers, without the sparse models' code, keys and extra
  // tensors.
  kHuggingFace,
  // llama_sparse_relu or qwen2_sparse_relu, with their sparsity_* keys.
  kSparse,
};
// The text of config.json in another layout, with another dtype of the weights, or with weights in
// 8 bits; with a head in 8 bits the embeddings are not tied. Keys keep their order; a text without
// changes is returned unmodified. InputError when the layout cannot represent the model.
std::string convert_config(const std::string& text, const std::string& source,
                           CheckpointLayout layout, std::optional<DType> dtype,
                           std::optional<ByteWeights> bytes = {});

}  // namespace twell
