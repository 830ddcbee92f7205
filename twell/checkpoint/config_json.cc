// SPDX-License-Identifier: Apache-2.0
// ModelConfig from and to Hugging Face config.json.
#include "twell/checkpoint/config_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/checkpoint/config_keys.h"
#include "twell/checkpoint/families.h"
#include "twell/checkpoint/json.h"
#include "twell/checkpoint/rope_json.h"

namespace twell {
namespace {

using nlohmann::json;

constexpr size_t kMaxBytes = size_t{1} << 20;  // published files are a few KiB
constexpr int kMaxDepth = 16;

void require_architecture(const Fields& fields, const FamilySpec& family) {
  const json* architectures = fields.find("architectures");
  if (architectures == nullptr) return;
  const auto supported = [&](const json& name) {
    return name == family.architecture ||
           // Some published sparse models name the class they were made from.
           (family.sparse && name == family_spec(family.family).architecture);
  };
  TWELL_REQUIRE(
      architectures->is_array() && architectures->size() == 1 && supported(architectures->front()),
      "{}: architectures {} do not go with model_type \"{}\"; supported is {}", fields.source(),
      Fields::show(*architectures), family.model_type, family.architecture);
}

Activation read_activation(const Fields& fields, const FamilySpec& family) {
  // The published sparse models carry a left-over "silu"; their model type means ReLU.
  if (family.sparse) return Activation::kRelu;
  const std::string name = fields.text("hidden_act", "silu");  // the default of transformers
  return parse_activation(name, fields.source() + ": hidden_act");
}

void read_sizes(const Fields& fields, const FamilySpec& family, ModelConfig& config) {
  const std::string& source = fields.source();
  config.vocab_size = fields.integer("vocab_size");
  config.width = fields.integer("hidden_size");
  config.ffn = fields.integer("intermediate_size");
  config.layers = fields.integer("num_hidden_layers");
  config.heads = fields.integer("num_attention_heads");
  const bool absent = !fields.given("num_key_value_heads");
  config.kv_heads = fields.integer("num_key_value_heads",
                                   absent && family.kv_heads > 0 ? family.kv_heads : config.heads);
  TWELL_REQUIRE(config.heads >= 1, "{}: num_attention_heads must be at least 1, got {}", source,
                config.heads);
  const bool derived = fields.find("head_dim") == nullptr && family.head_dim == 0;
  TWELL_REQUIRE(!derived || config.width % config.heads == 0,
                "{}: hidden_size {} is not a multiple of num_attention_heads {}, and head_dim is "
                "not given",
                source, config.width, config.heads);
  config.head_dim =
      fields.integer("head_dim", derived ? config.width / config.heads : family.head_dim);
  config.context = fields.integer("max_position_embeddings", family.context);
}

// Which layers slide does not matter here: no sequence is longer than the window.
void read_window(const Fields& fields, const FamilySpec& family, ModelConfig& config) {
  const bool given = fields.given("sliding_window");
  config.sliding_window = fields.integer("sliding_window", given ? 0 : family.window);
  if (family.window_switch && !fields.boolean("use_sliding_window", false)) {
    config.sliding_window = 0;
  }
  if (family.window == 0) {
    TWELL_REQUIRE(config.sliding_window == 0, "{}: a sliding_window is not supported with {}",
                  fields.source(), family.model_type);
  }
  const json* types = fields.find("layer_types");
  if (types == nullptr) return;
  TWELL_REQUIRE(types->is_array(), "{}: layer_types must be a list, got {}", fields.source(),
                Fields::show(*types));
  for (const json& type : *types) {
    TWELL_REQUIRE(
        type == "full_attention" || (type == "sliding_attention" && config.sliding_window > 0),
        "{}: a layer of type {} is not supported", fields.source(), Fields::show(type));
  }
}

void read_tokens(const Fields& fields, ModelConfig& config) {
  config.bos_token = fields.integer("bos_token_id", -1);
  const json* eos = fields.find("eos_token_id");
  if (eos == nullptr) return;
  if (!eos->is_array()) {
    config.eos_token = fields.to_integer("eos_token_id", *eos);
    return;
  }
  for (const json& token : *eos) {
    const int64_t id = fields.to_integer("eos_token_id", token);
    if (config.eos_token < 0) {
      config.eos_token = id;
    } else {
      config.more_eos_tokens.push_back(id);
    }
  }
}

// The published sparse models: sparsity_* keys have the last word on the FFN.
void read_sparsity(const Fields& fields, ModelConfig& config) {
  config.gated = fields.boolean("sparsity_gated_mlp", config.gated);
  config.ffn = fields.integer("sparsity_new_intermediate_size", config.ffn);
}

json eos_to_json(const ModelConfig& config) {
  if (config.eos_token < 0) return nullptr;
  if (config.more_eos_tokens.empty()) return config.eos_token;
  json out = {config.eos_token};
  for (const int64_t token : config.more_eos_tokens) out.push_back(token);
  return out;
}

}  // namespace

ModelConfig parse_config(const json& object, const std::string& source) {
  TWELL_REQUIRE(object.is_object(), "{}: expected a JSON object", source);
  const Fields fields(object, source);
  const FamilySpec& family = family_of_model_type(fields.text("model_type", ""), source);
  require_architecture(fields, family);
  require_known_keys(fields, family);

  ModelConfig config;
  config.family = family.family;
  config.qkv_bias = family.qkv_bias;
  config.qk_norm = family.qk_norm;
  config.activation = read_activation(fields, family);
  read_sizes(fields, family, config);
  read_window(fields, family, config);
  read_rope(fields, config);
  read_tokens(fields, config);
  config.gated = fields.boolean("mlp_gated", true);
  if (family.sparse) read_sparsity(fields, config);
  config.tied_embeddings = fields.boolean("tie_word_embeddings", false);
  config.norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.init_std = fields.number("initializer_range", 0.02);
  try {
    config.validate();
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", source, error.what()));
  }
  return config;
}

ModelConfig parse_config_text(std::string_view text, const std::string& source) {
  TWELL_REQUIRE(text.size() <= kMaxBytes, "{}: {} bytes are too many for a model configuration",
                source, text.size());
  return parse_config(parse_json(text, source, kMaxDepth), source);
}

json config_to_json(const ModelConfig& config) {
  const FamilySpec& family = family_spec(config.family);
  json object = {
      {"architectures", {family.architecture}},
      {"model_type", family.model_type},
      {"hidden_act", activation_name(config.activation)},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.width},
      {"intermediate_size", config.ffn},
      {"num_hidden_layers", config.layers},
      {"num_attention_heads", config.heads},
      {"num_key_value_heads", config.kv_heads},
      {"head_dim", config.head_dim},
      {"max_position_embeddings", config.context},
      {"tie_word_embeddings", config.tied_embeddings},
      {"rope_theta", config.rope_theta},
      {"rope_scaling", rope_scaling_to_json(config.rope_scaling)},
      {"rms_norm_eps", config.norm_eps},
      {"initializer_range", config.init_std},
      {"bos_token_id", config.bos_token < 0 ? json(nullptr) : json(config.bos_token)},
      {"eos_token_id", eos_to_json(config)},
  };
  if (family.family == Family::kLlama) object["attention_bias"] = object["mlp_bias"] = false;
  if (family.window > 0) {
    object["sliding_window"] =
        config.sliding_window > 0 ? json(config.sliding_window) : json(nullptr);
  }
  if (family.window_switch) {
    object["use_sliding_window"] = config.sliding_window > 0;
    object["max_window_layers"] = config.sliding_window > 0 ? 0 : config.layers;
  }
  if (!config.gated) object["mlp_gated"] = false;
  return object;
}

}  // namespace twell
