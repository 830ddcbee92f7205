// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/schema_keywords.h"

#include <fmt/core.h>

namespace twell::json_schema {

using nlohmann::ordered_json;

void refuse_schema(const std::string& path, const std::string& why) {
  throw InputError(
      fmt::format("the JSON schema cannot be used: {} at \"{}\"", why, path.empty() ? "#" : path));
}

void nothing_fits(const std::string& path, const std::string& why) {
  throw NothingFits(
      fmt::format("the JSON schema cannot be used: no value fits, because {} at \"{}\"", why,
                  path.empty() ? "#" : path));
}

bool is_of_type(const ordered_json& value, const std::string& type) {
  return (type == "null" && value.is_null()) || (type == "boolean" && value.is_boolean()) ||
         (type == "object" && value.is_object()) || (type == "array" && value.is_array()) ||
         (type == "string" && value.is_string()) || (type == "number" && value.is_number()) ||
         (type == "integer" && value.is_number_integer());
}

std::vector<std::string> types_of(const ordered_json& schema, const std::string& path) {
  static const std::set<std::string> kTypes = {"null",   "boolean", "object", "array",
                                               "number", "integer", "string"};
  std::vector<std::string> types;
  const auto type = schema.find("type");
  if (type == schema.end()) return types;
  const ordered_json list = type->is_array() ? *type : ordered_json::array({*type});
  for (const ordered_json& one : list) {
    if (!one.is_string() || !kTypes.contains(one.get<std::string>())) {
      refuse_schema(path + "/type", "the type " + one.dump() + " is unknown");
    }
    types.push_back(one.get<std::string>());
  }
  if (types.empty()) refuse_schema(path + "/type", "there is no type");
  return types;
}

}  // namespace twell::json_schema
