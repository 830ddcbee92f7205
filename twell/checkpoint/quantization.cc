// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/quantization.h"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>

#include "twell/base/error.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kMethod = "compressed-tensors";
constexpr const char* kLinear = "Linear";  // torch's class of projections and of the head
constexpr const char* kHeadModule = "lm_head";

// A module in `targets` or `ignore` that is the output head, by its name or as a regular
// expression.
bool names_head(const json& module) {
  for (const char* name :
       {kHeadModule, "re:lm_head", "re:.*lm_head", "re:.*lm_head$", "re:^lm_head$"}) {
    if (module == name) return true;
  }
  return false;
}

// The entries of a list of modules, which may be absent or null.
std::vector<json> modules(const JsonFields& fields, const char* name) {
  const json* list = fields.find(name);
  if (list == nullptr || list->is_null()) return {};
  TWELL_REQUIRE(list->is_array(), "{}: {} must be a list of modules, got {}", fields.where(), name,
                show(*list));
  return {list->begin(), list->end()};
}

const char* format_name(ByteType type) {
  return type == ByteType::kE4M3 ? "float-quantized" : "int-quantized";
}
const char* number_name(ByteType type) { return type == ByteType::kE4M3 ? "float" : "int"; }

// InputError unless the field, where it is given, has one of these values.
void require_value(const JsonFields& fields, const char* name,
                   std::initializer_list<json> supported) {
  const json* value = fields.find(name);
  if (value == nullptr) return;
  const bool known = std::any_of(supported.begin(), supported.end(),
                                 [&](const json& one) { return one == *value; });
  TWELL_REQUIRE(known, "{}: {} {} is not supported; supported is {}", fields.where(), name,
                show(*value), show(*supported.begin()));
}

void require_scheme(const JsonFields& scheme, ByteType type, const char* strategy, bool dynamic) {
  TWELL_REQUIRE(scheme.integer("num_bits") == 8, "{}: num_bits {} is not supported; supported is 8",
                scheme.where(), scheme.integer("num_bits"));
  TWELL_REQUIRE(scheme.text("type") == number_name(type),
                "{}: type \"{}\" is not supported; supported with this format is \"{}\"",
                scheme.where(), scheme.text("type"), number_name(type));
  TWELL_REQUIRE(scheme.text("strategy", "tensor") == strategy,
                "{}: strategy \"{}\" is not supported; supported is \"{}\"", scheme.where(),
                scheme.text("strategy", "tensor"), strategy);
  TWELL_REQUIRE(scheme.boolean("symmetric", true), "{}: only symmetric values are supported",
                scheme.where());
  require_value(scheme, "dynamic", {dynamic});
  for (const char* absent : {"group_size", "block_structure", "actorder"}) {
    require_value(scheme, absent, {nullptr});
  }
}

}  // namespace

std::optional<ByteWeights> parse_quantization(const JsonFields& config) {
  if (config.find("quantization_config") == nullptr) return {};
  const JsonFields fields(config.object("quantization_config"),
                          config.where() + ": quantization_config");
  TWELL_REQUIRE(fields.text("quant_method", "") == kMethod,
                "{}: quant_method \"{}\" is not supported; supported is \"{}\"", fields.where(),
                fields.text("quant_method", ""), kMethod);
  const std::string format = fields.text("format");
  TWELL_REQUIRE(format == format_name(ByteType::kE4M3) || format == format_name(ByteType::kInt8),
                "{}: format \"{}\" is not supported; supported are \"float-quantized\" and "
                "\"int-quantized\"",
                fields.where(), format);
  const ByteType type = format == format_name(ByteType::kE4M3) ? ByteType::kE4M3 : ByteType::kInt8;
  require_value(fields, "quantization_status", {"compressed"});
  require_value(fields, "kv_cache_scheme", {nullptr});
  if (fields.find("sparsity_config") != nullptr && !fields.object("sparsity_config").empty()) {
    const JsonFields sparsity(fields.object("sparsity_config"),
                              fields.where() + ": sparsity_config");
    require_value(sparsity, "format", {"dense"});
  }
  if (fields.find("transform_config") != nullptr) {
    TWELL_REQUIRE(fields.object("transform_config").empty(),
                  "{}: a transform_config is not supported", fields.where());
  }
  const json& groups = fields.object("config_groups");
  TWELL_REQUIRE(groups.size() == 1, "{}: {} config_groups are not supported; supported is one",
                fields.where(), groups.size());
  const JsonFields group(groups.front(), fields.where() + ": " + groups.begin().key());
  const std::vector<json> targets = modules(group, "targets");
  TWELL_REQUIRE(
      std::ranges::count(targets, json(kLinear)) == 1 &&
          std::ranges::all_of(
              targets, [](const json& target) { return target == kLinear || names_head(target); }),
      "{}: targets {} is not supported; supported are [\"{}\"] and [\"{}\", \"{}\"]", group.where(),
      show(group.value().value("targets", json())), kLinear, kLinear, kHeadModule);
  require_value(group, "format", {format});
  require_value(group, "output_activations", {nullptr});
  require_scheme(JsonFields(group.object("weights"), group.where() + ": weights"), type, "channel",
                 false);
  TWELL_REQUIRE(group.find("input_activations") != nullptr,
                "{}: weights alone in 8 bits are not supported; input_activations must be dynamic",
                group.where());
  require_scheme(
      JsonFields(group.object("input_activations"), group.where() + ": input_activations"), type,
      "token", true);
  return ByteWeights{type, !std::ranges::any_of(modules(fields, "ignore"), names_head)};
}

ordered_json quantization_to_json(ByteWeights weights) {
  const auto type = weights.type;
  const bool head = weights.head;
  const auto scheme = [&](const char* strategy, bool dynamic) {
    return ordered_json{{"num_bits", 8},       {"type", number_name(type)},
                        {"symmetric", true},   {"strategy", strategy},
                        {"dynamic", dynamic},  {"group_size", nullptr},
                        {"actorder", nullptr}, {"block_structure", nullptr}};
  };
  return {{"quant_method", kMethod},
          {"format", format_name(type)},
          {"quantization_status", "compressed"},
          {"config_groups",
           {{"group_0",
             {{"targets", head ? ordered_json{kLinear, kHeadModule} : ordered_json{kLinear}},
              {"weights", scheme("channel", false)},
              {"input_activations", scheme("token", true)},
              {"output_activations", nullptr}}}}},
          {"ignore", head ? ordered_json::array() : ordered_json{kHeadModule}},
          {"kv_cache_scheme", nullptr}};
}

bool is_projection(const ParamSpec& spec) {
  return !spec.is_vector && spec.name.starts_with("model.layers.");
}

bool is_head(const ParamSpec& spec) { return spec.name == "lm_head.weight"; }

std::string scale_name(const std::string& weight_name) { return weight_name + "_scale"; }

ByteType parse_byte_type(std::string_view name) {
  if (name == "fp8") return ByteType::kE4M3;
  if (name == "int8") return ByteType::kInt8;
  throw InputError(fmt::format("unknown type of weights '{}'; use fp8 or int8", name));
}

std::string_view byte_option_name(ByteType type) {
  return type == ByteType::kE4M3 ? "fp8" : "int8";
}

}  // namespace twell
