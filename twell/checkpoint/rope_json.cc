// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/rope_json.h"

#include <algorithm>
#include <string_view>

namespace twell {
namespace {

using nlohmann::json;

struct TypeName {
  RopeType type;
  const char* name;
};
constexpr TypeName kTypes[] = {{RopeType::kDefault, "default"},
                               {RopeType::kLinear, "linear"},
                               {RopeType::kDynamic, "dynamic"},
                               {RopeType::kLlama3, "llama3"},
                               {RopeType::kYarn, "yarn"}};

constexpr std::string_view kKeys[] = {"rope_type",
                                      "type",
                                      "rope_theta",
                                      "factor",
                                      "original_max_position_embeddings",
                                      "low_freq_factor",
                                      "high_freq_factor",
                                      "beta_fast",
                                      "beta_slow",
                                      "attention_factor",
                                      "mscale",
                                      "mscale_all_dim",
                                      "truncate",
                                      "partial_rotary_factor"};

RopeType parse_type(const std::string& name, const char* key, const std::string& source) {
  for (const TypeName& type : kTypes) {
    if (name == type.name) return type.type;
  }
  throw InputError(
      fmt::format("{}: {} of type \"{}\" is not supported; supported are default, linear, dynamic, "
                  "llama3 and yarn",
                  source, key, name));
}

// beta_fast and beta_slow: 0 means the default to transformers.
double positive_or(double value, double fallback) { return value == 0.0 ? fallback : value; }

void read_object(const char* key, const Fields& rope, ModelConfig& config) {
  const std::string& source = rope.source();
  for (const auto& [inner, value] : rope.object().items()) {
    TWELL_REQUIRE(std::find(std::begin(kKeys), std::end(kKeys), inner) != std::end(kKeys),
                  "{}: {} of {} ({}) is not understood", source, inner, key, Fields::show(value));
  }
  TWELL_REQUIRE(rope.number("partial_rotary_factor", 1.0) == 1.0,
                "{}: partial_rotary_factor other than 1 is not supported", source);
  config.rope_theta = rope.number("rope_theta", config.rope_theta);
  RopeScaling& out = config.rope_scaling;
  out.type = parse_type(rope.text("rope_type", rope.text("type", "default").c_str()), key, source);
  if (out.type == RopeType::kDefault) return;
  const bool relative = out.type == RopeType::kLlama3 || out.type == RopeType::kYarn;
  if (relative) {
    // A key of the configuration itself goes first, as it does in transformers.
    const int64_t own = rope.integer("original_max_position_embeddings", config.context);
    out.original_context = out.original_context > 0 ? out.original_context : own;
  }
  const bool from_contexts = out.type == RopeType::kYarn && out.original_context > 0;
  TWELL_REQUIRE(rope.find("factor") != nullptr || from_contexts, "{}: factor of {} is missing",
                source, key);
  const double ratio = from_contexts ? static_cast<double>(config.context) /
                                           static_cast<double>(out.original_context)
                                     : 1.0;
  out.factor = rope.number("factor", ratio);
  if (out.type == RopeType::kLlama3) {
    out.low_freq_factor = rope.number("low_freq_factor", out.low_freq_factor);
    out.high_freq_factor = rope.number("high_freq_factor", out.high_freq_factor);
  }
  if (out.type == RopeType::kYarn) {
    out.beta_fast = positive_or(rope.number("beta_fast", 0.0), out.beta_fast);
    out.beta_slow = positive_or(rope.number("beta_slow", 0.0), out.beta_slow);
    out.attention_factor = rope.number("attention_factor", 0.0);
    out.mscale = rope.number("mscale", 0.0);
    out.mscale_all_dim = rope.number("mscale_all_dim", 0.0);
    out.truncate = rope.boolean("truncate", true);
  }
}

}  // namespace

void read_rope(const Fields& fields, ModelConfig& config) {
  config.rope_theta = fields.number("rope_theta", 10000.0);
  config.rope_scaling = {};
  const int64_t original = fields.integer("original_max_position_embeddings", 0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* rope = fields.find(key);
    if (rope == nullptr) continue;
    TWELL_REQUIRE(rope->is_object(), "{}: {} must be an object or null, got {}", fields.source(),
                  key, Fields::show(*rope));
    config.rope_scaling = {.original_context = original};
    read_object(key, Fields(*rope, fields.source()), config);
    const RopeType type = config.rope_scaling.type;
    if (type != RopeType::kLlama3 && type != RopeType::kYarn) {
      config.rope_scaling.original_context = 0;
    }
  }
}

json rope_scaling_to_json(const RopeScaling& rope) {
  if (rope.type == RopeType::kDefault) return nullptr;
  const auto name = std::find_if(std::begin(kTypes), std::end(kTypes),
                                 [&](const TypeName& type) { return type.type == rope.type; });
  json out = {{"rope_type", name->name}, {"factor", rope.factor}};
  if (rope.type == RopeType::kLlama3 || rope.type == RopeType::kYarn) {
    out["original_max_position_embeddings"] = rope.original_context;
  }
  if (rope.type == RopeType::kLlama3) {
    out["low_freq_factor"] = rope.low_freq_factor;
    out["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == RopeType::kYarn) {
    out["beta_fast"] = rope.beta_fast;
    out["beta_slow"] = rope.beta_slow;
    out["truncate"] = rope.truncate;
    if (rope.attention_factor > 0.0) out["attention_factor"] = rope.attention_factor;
    if (rope.mscale > 0.0) out["mscale"] = rope.mscale;
    if (rope.mscale_all_dim > 0.0) out["mscale_all_dim"] = rope.mscale_all_dim;
  }
  return out;
}

}  // namespace twell
