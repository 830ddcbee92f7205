// SPDX-License-Identifier: Apache-2.0
// ModelConfig from and to Hugging Face config.json.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/model/config.h"
#include "twell/model/json.h"

namespace twell {
namespace {

using nlohmann::json;

constexpr size_t kMaxBytes = size_t{1} << 20;  // published files are a few KiB
constexpr int kMaxDepth = 16;

// Typed access to the keys of one object; null counts as absent, as it does in transformers.
class Fields {
 public:
  Fields(const json& object, const std::string& source) : object_(object), source_(source) {}

  const json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(const char* key) const {
    TWELL_REQUIRE(find(key) != nullptr, "{}: {} is missing", source_, key);
    return integer(key, 0);
  }
  int64_t integer(const char* key, int64_t fallback) const {
    const json* value = find(key);
    return value == nullptr ? fallback : to_integer(key, *value);
  }
  double number(const char* key, double fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    TWELL_REQUIRE(value->is_number(), "{}: {} must be a number, got {}", source_, key,
                  show(*value));
    return value->get<double>();
  }
  bool boolean(const char* key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    TWELL_REQUIRE(value->is_boolean(), "{}: {} must be true or false, got {}", source_, key,
                  show(*value));
    return value->get<bool>();
  }
  std::string text(const char* key, const char* fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    TWELL_REQUIRE(value->is_string(), "{}: {} must be a string, got {}", source_, key,
                  show(*value));
    return value->get<std::string>();
  }
  // A token id, or a list that holds one; -1 when there is none.
  int64_t token(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return -1;
    if (!value->is_array()) return to_integer(key, *value);
    TWELL_REQUIRE(value->size() == 1, "{}: {} must be one token, got {}; keep the one to be used",
                  source_, key, show(*value));
    return to_integer(key, value->front());
  }
  static std::string show(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > 60) text.replace(57, std::string::npos, "...");
    return text;
  }

 private:
  int64_t to_integer(const char* key, const json& value) const {
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
    TWELL_REQUIRE(fits, "{}: {} must be an integer, got {}", source_, key, show(value));
    return value.get<int64_t>();
  }

  const json& object_;
  const std::string& source_;
};

void require_architecture(const Fields& fields, const std::string& model_type,
                          const std::string& source) {
  TWELL_REQUIRE(
      model_type == "llama" || model_type == "llama_sparse_relu",
      "{}: model_type \"{}\" is not supported; supported are llama (with hidden_act relu) "
      "and llama_sparse_relu",
      source, model_type);
  const json* architectures = fields.find("architectures");
  if (architectures == nullptr) return;
  const json supported = {"LlamaForCausalLM", "SparseLlamaForCausalLM"};
  const bool known =
      architectures->is_array() && architectures->size() == 1 &&
      std::find(supported.begin(), supported.end(), architectures->front()) != supported.end();
  TWELL_REQUIRE(known, "{}: architectures {} are not supported; supported is LlamaForCausalLM",
                source, Fields::show(*architectures));
}

void require_relu(const Fields& fields, const std::string& model_type, const std::string& source) {
  // The published sparse models carry a left-over "silu"; their model type means ReLU.
  if (model_type == "llama_sparse_relu") return;
  const std::string act = fields.text("hidden_act", "silu");  // the default of transformers
  TWELL_REQUIRE(act == "relu",
                "{}: hidden_act \"{}\" is not supported: only \"relu\" gives the exact zeros that "
                "sparse layers need; use a model trained with relu",
                source, act);
}

void require_plain_options(const Fields& fields, const std::string& source) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    TWELL_REQUIRE(!fields.boolean(key, false), "{}: {} true is not supported (no biases)", source,
                  key);
  }
  TWELL_REQUIRE(fields.number("partial_rotary_factor", 1.0) == 1.0,
                "{}: partial_rotary_factor other than 1 is not supported", source);
  TWELL_REQUIRE(fields.find("quantization_config") == nullptr,
                "{}: quantization_config is not supported; use the unquantized checkpoint", source);
}

// Older files: rope_theta beside rope_scaling (null). Newer ones: both inside rope_parameters.
double read_rope_theta(const Fields& fields, const std::string& source) {
  double theta = fields.number("rope_theta", 10000.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* rope = fields.find(key);
    if (rope == nullptr) continue;
    TWELL_REQUIRE(rope->is_object(), "{}: {} must be an object or null, got {}", source, key,
                  Fields::show(*rope));
    const Fields inner(*rope, source);
    const std::string type = inner.text("rope_type", inner.text("type", "default").c_str());
    TWELL_REQUIRE(type == "default",
                  "{}: {} of type \"{}\" is not supported; only plain rotary embeddings are",
                  source, key, type);
    TWELL_REQUIRE(inner.number("partial_rotary_factor", 1.0) == 1.0,
                  "{}: partial_rotary_factor other than 1 is not supported", source);
    theta = inner.number("rope_theta", theta);
  }
  return theta;
}

}  // namespace

ModelConfig parse_config(const json& object, const std::string& source) {
  TWELL_REQUIRE(object.is_object(), "{}: expected a JSON object", source);
  const Fields fields(object, source);
  const std::string model_type = fields.text("model_type", "");
  require_architecture(fields, model_type, source);
  require_relu(fields, model_type, source);
  require_plain_options(fields, source);

  ModelConfig config;
  config.vocab_size = fields.integer("vocab_size");
  config.width = fields.integer("hidden_size");
  config.ffn = fields.integer("intermediate_size");
  config.layers = fields.integer("num_hidden_layers");
  config.heads = fields.integer("num_attention_heads");
  config.kv_heads = fields.integer("num_key_value_heads", config.heads);
  TWELL_REQUIRE(config.heads >= 1, "{}: num_attention_heads must be at least 1, got {}", source,
                config.heads);
  TWELL_REQUIRE(fields.find("head_dim") != nullptr || config.width % config.heads == 0,
                "{}: hidden_size {} is not a multiple of num_attention_heads {}, and head_dim is "
                "not given",
                source, config.width, config.heads);
  config.head_dim = fields.integer("head_dim", config.width / config.heads);
  config.context = fields.integer("max_position_embeddings", 2048);
  config.gated = fields.boolean("mlp_gated", true);
  config.tied_embeddings = fields.boolean("tie_word_embeddings", false);
  config.rope_theta = read_rope_theta(fields, source);
  config.norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.init_std = fields.number("initializer_range", 0.02);
  config.bos_token = fields.token("bos_token_id");
  config.eos_token = fields.token("eos_token_id");
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
  const auto token = [](int64_t id) { return id < 0 ? json(nullptr) : json(id); };
  json object = {
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"hidden_act", "relu"},
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
      {"rope_scaling", nullptr},
      {"rms_norm_eps", config.norm_eps},
      {"initializer_range", config.init_std},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"bos_token_id", token(config.bos_token)},
      {"eos_token_id", token(config.eos_token)},
  };
  if (!config.gated) object["mlp_gated"] = false;
  return object;
}

}  // namespace twell
