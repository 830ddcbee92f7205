// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/schema_merge.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "twell/grammar/schema_keywords.h"

namespace twell::json_schema {
namespace {

using nlohmann::ordered_json;

// Equal as JSON values, in which objects have no order.
bool equal_values(const ordered_json& a, const ordered_json& b) {
  return nlohmann::json(a) == nlohmann::json(b);
}

void merge_properties(ordered_json& a, const ordered_json& b, const std::string& path) {
  const ordered_json none = ordered_json::object();
  const auto of = [&](const ordered_json& schema) -> const ordered_json& {
    const auto found = schema.find("properties");
    if (found == schema.end()) return none;
    if (!found->is_object()) refuse_schema(path + "/properties", "an object is expected");
    return *found;
  };
  const auto others = [](const ordered_json& schema) {
    const auto found = schema.find("additionalProperties");
    return found == schema.end() ? ordered_json(true) : *found;
  };
  const ordered_json from_a = of(a), &from_b = of(b);
  const ordered_json others_a = others(a), others_b = others(b);
  ordered_json all = ordered_json::object();
  for (const auto& [name, value] : from_a.items()) {
    all[name] = both_of(value, from_b.contains(name) ? from_b[name] : others_b);
  }
  for (const auto& [name, value] : from_b.items()) {
    if (!from_a.contains(name)) all[name] = both_of(others_a, value);
  }
  if (!all.empty()) a["properties"] = std::move(all);
  if (a.contains("additionalProperties") || b.contains("additionalProperties")) {
    a["additionalProperties"] =
        others_a == false || others_b == false ? ordered_json(false) : both_of(others_a, others_b);
  }
}

void merge_items(ordered_json& a, const ordered_json& b) {
  const auto rest = [](const ordered_json& schema) {
    const auto found = schema.find("items");
    return found == schema.end() ? ordered_json(true) : *found;
  };
  const auto count = [](const ordered_json& schema) {
    const auto found = schema.find("prefixItems");
    return found == schema.end() || !found->is_array() ? size_t{0} : found->size();
  };
  const auto item = [&](const ordered_json& schema, size_t i) {
    return i < count(schema) ? schema["prefixItems"][i] : rest(schema);
  };
  const size_t most = std::max(count(a), count(b));
  ordered_json first = ordered_json::array();
  for (size_t i = 0; i < most; ++i) first.push_back(both_of(item(a, i), item(b, i)));
  if (a.contains("items") || b.contains("items")) {
    const ordered_json rest_a = rest(a), rest_b = rest(b);
    a["items"] = rest_a == false || rest_b == false ? ordered_json(false) : both_of(rest_a, rest_b);
  }
  if (most > 0) a["prefixItems"] = std::move(first);
}

void merge_types(ordered_json& a, const ordered_json& b, const std::string& path) {
  const std::vector<std::string> from_a = types_of(a, path), from_b = types_of(b, path);
  ordered_json both = ordered_json::array();
  const auto has = [](const std::vector<std::string>& types, const std::string& type) {
    return std::ranges::find(types, type) != types.end() ||
           (type == "integer" && std::ranges::find(types, "number") != types.end());
  };
  for (const char* type : {"null", "boolean", "object", "array", "number", "integer", "string"}) {
    if (!has(from_a, type) || !has(from_b, type)) continue;
    if (std::string_view(type) == "integer" && std::ranges::find(both, "number") != both.end()) {
      continue;
    }
    both.push_back(type);
  }
  if (both.empty()) nothing_fits(path + "/type", "it excludes the types that are beside it");
  a["type"] = both.size() == 1 ? both[0] : both;
}

// The values among those that `a` lists, if it does.
void merge_values(ordered_json& a, const ordered_json& values, const std::string& path) {
  if (!values.is_array() || values.empty()) {
    refuse_schema(path + "/enum", "a list of values is expected");
  }
  ordered_json both = ordered_json::array();
  const bool listed = a.contains("const") || a.contains("enum");
  const ordered_json before = a.contains("const") ? ordered_json::array({a["const"]})
                              : listed            ? a["enum"]
                                                  : values;
  for (const ordered_json& value : values) {
    for (const ordered_json& other : before) {
      if (!equal_values(value, other)) continue;
      both.push_back(value);
      break;
    }
  }
  if (both.empty()) nothing_fits(path, "it excludes the values that are beside it");
  a.erase("const");
  a["enum"] = std::move(both);
}

}  // namespace

ordered_json both_of(const ordered_json& a, const ordered_json& b) {
  if (a == true || a == b) return b;
  if (b == true) return a;
  return ordered_json{{"allOf", {a, b}}};
}

void merge(ordered_json& a, const ordered_json& b, const std::string& path) {
  if (b == true) return;
  if (b == false) nothing_fits(path, "the schema is false");
  const auto cannot = [&](const std::string& keyword) {
    refuse_schema(path + "/" + keyword,
                  fmt::format("\"{}\" beside what it is merged with is not supported", keyword));
  };
  for (const char* both : {"unevaluatedProperties", "unevaluatedItems"}) {
    if (b.contains(both)) cannot(both);  // it sees the keywords of its own schema alone
  }
  // Patterns of one apply to properties of the other.
  using Two = std::pair<const ordered_json*, const ordered_json*>;
  for (const auto& [one, other] : {Two(&a, &b), Two(&b, &a)}) {
    if (!one->contains("patternProperties")) continue;
    for (const char* keyword :
         {"properties", "additionalProperties", "patternProperties", "propertyNames"}) {
      if (other->contains(keyword)) cannot(keyword);
    }
  }
  merge_properties(a, b, path);
  merge_items(a, b);
  for (const auto& [keyword, value] : b.items()) {
    if (kAnnotations.contains(keyword)) continue;
    if (keyword == "properties" || keyword == "additionalProperties" || keyword == "items" ||
        keyword == "prefixItems") {
      continue;
    }
    const auto found = a.find(keyword);
    if (keyword == "enum" || keyword == "const") {
      merge_values(a, keyword == "const" ? ordered_json::array({value}) : value, path);
    } else if (found == a.end() || *found == value) {
      a[keyword] = value;
    } else if (keyword == "not") {  // what remains of it: lists of values
      for (const ordered_json& one : value["enum"]) (*found)["enum"].push_back(one);
    } else if (keyword == "anyOf" && found->is_array() && value.is_array()) {
      if (found->size() * value.size() > kMostAlternatives) {
        refuse_schema(path + "/anyOf", fmt::format("more than {} alternatives are not supported",
                                                   kMostAlternatives));
      }
      ordered_json pairs = ordered_json::array();
      for (const ordered_json& one : *found) {
        for (const ordered_json& other : value) pairs.push_back(both_of(one, other));
      }
      *found = std::move(pairs);
    } else if (keyword == "type") {
      merge_types(a, b, path);
    } else if (keyword == "required" && found->is_array() && value.is_array()) {
      for (const ordered_json& name : value) {
        if (std::ranges::find(*found, name) == found->end()) found->push_back(name);
      }
    } else if (keyword.starts_with("min") || keyword == "exclusiveMinimum") {
      if (!found->is_number() || !value.is_number()) cannot(keyword);
      if (*found < value) *found = value;
    } else if (keyword.starts_with("max") || keyword == "exclusiveMaximum") {
      if (!found->is_number() || !value.is_number()) cannot(keyword);
      if (value < *found) *found = value;
    } else if (keyword == "multipleOf" && found->is_number_unsigned() &&
               value.is_number_unsigned() && *found > 0 && value > 0 && *found <= kMostMultiple &&
               value <= kMostMultiple) {
      *found = std::lcm(found->get<int64_t>(), value.get<int64_t>());
    } else {
      cannot(keyword);
    }
  }
}

std::optional<bool> fits(const ordered_json& value, const std::string& keyword,
                         const ordered_json& bound, const ordered_json& schema,
                         const std::string& path) {
  if (keyword == "not") {
    return std::ranges::none_of(
        bound["enum"], [&](const ordered_json& other) { return equal_values(value, other); });
  }
  if (keyword == "type") {
    const std::vector<std::string> types = types_of(schema, path);
    return std::ranges::any_of(types,
                               [&](const std::string& type) { return is_of_type(value, type); });
  }
  if (kOfNumbers.contains(keyword) && value.is_number()) {
    if (!bound.is_number()) return std::nullopt;
    if (keyword == "minimum") return value >= bound;
    if (keyword == "maximum") return value <= bound;
    if (keyword == "exclusiveMinimum") return value > bound;
    if (keyword == "exclusiveMaximum") return value < bound;
    return std::nullopt;
  }
  if (kOfStrings.contains(keyword) && value.is_string()) return std::nullopt;
  if (kOfArrays.contains(keyword) && value.is_array()) {
    if (!bound.is_number_unsigned()) return std::nullopt;
    if (keyword == "minItems") return value.size() >= bound.get<uint64_t>();
    if (keyword == "maxItems") return value.size() <= bound.get<uint64_t>();
    return std::nullopt;
  }
  if (kOfObjects.contains(keyword) && value.is_object()) {
    if (keyword != "required" || !bound.is_array()) return std::nullopt;
    return std::ranges::all_of(bound, [&](const ordered_json& name) {
      return name.is_string() && value.contains(name.get<std::string>());
    });
  }
  const bool about_others = kOfNumbers.contains(keyword) || kOfStrings.contains(keyword) ||
                            kOfArrays.contains(keyword) || kOfObjects.contains(keyword);
  return about_others ? std::optional(true) : std::nullopt;
}

void filter_values(ordered_json& schema, const std::string& path) {
  if (schema.contains("const") && schema.contains("enum")) {
    const ordered_json values = schema["enum"];
    schema.erase("enum");
    merge_values(schema, values, path);
  }
  const bool one = schema.contains("const");
  const ordered_json values = one ? ordered_json::array({schema["const"]}) : schema["enum"];
  if (!values.is_array()) return;
  std::vector<std::string> told;
  ordered_json kept = values;
  for (const auto& [keyword, bound] : schema.items()) {
    if (kAnnotations.contains(keyword) || keyword == "const" || keyword == "enum") continue;
    ordered_json fitting = ordered_json::array();
    bool known = true;
    for (const ordered_json& value : kept) {
      const std::optional<bool> found = fits(value, keyword, bound, schema, path);
      known &= found.has_value();
      if (found.value_or(true)) fitting.push_back(value);
    }
    if (!known) continue;
    kept = std::move(fitting);
    told.push_back(keyword);
  }
  if (kept.empty()) nothing_fits(path, "its values do not validate by the keywords beside them");
  for (const std::string& keyword : told) schema.erase(keyword);
  if (!one) schema["enum"] = std::move(kept);
}

}  // namespace twell::json_schema
