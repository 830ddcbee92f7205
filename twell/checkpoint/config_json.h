// SPDX-License-Identifier: Apache-2.0
// config.json: the model configuration as Hugging Face writes it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "twell/model/config.h"

namespace twell {

// Hugging Face config.json of the families above, and the published llama_sparse_relu and
// qwen2_sparse_relu. An architecture, activation, option or key that is not understood is refused
// by name; `source` is named in the message.
ModelConfig parse_config(const nlohmann::json& json, const std::string& source);
ModelConfig parse_config_text(std::string_view text, const std::string& source);
// What transformers reads as the family's own class; a model that is not gated carries
// "mlp_gated": false, which only this project understands.
nlohmann::json config_to_json(const ModelConfig& config);

}  // namespace twell
