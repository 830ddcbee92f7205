// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/json_schema.h"

#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/json.h"

namespace twell {
namespace {

using nlohmann::ordered_json;

constexpr int kMostDepth = 24;  // of schemas within each other

// Keywords that say nothing about what validates.
const std::set<std::string> kAnnotations = {"$schema",
                                            "$id",
                                            "$comment",
                                            "$anchor",
                                            "$defs",
                                            "definitions",
                                            "title",
                                            "default",
                                            "examples",
                                            "description",
                                            "deprecated",
                                            "readOnly",
                                            "writeOnly",
                                            "$vocabulary",
                                            "example",
                                            "contentEncoding",
                                            "contentMediaType",
                                            "contentSchema",
                                            "discriminator",
                                            "nullable"};
// These apply to a value of any type.
const std::set<std::string> kApplicators = {"type",  "enum",  "const", "anyOf",
                                            "oneOf", "allOf", "$ref"};
const std::set<std::string> kOfNumbers = {"minimum", "maximum", "exclusiveMinimum",
                                          "exclusiveMaximum", "multipleOf"};
const std::set<std::string> kOfStrings = {"minLength", "maxLength", "pattern", "format"};
const std::set<std::string> kOfArrays = {"items", "prefixItems", "minItems", "maxItems",
                                         "unevaluatedItems"};
const std::set<std::string> kOfObjects = {
    "properties",    "required",      "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties",        "unevaluatedProperties"};
// Formats that the library writes; of others it would write any string. Its ipv4 has leading zeros.
const std::set<std::string> kFormats = {"email",
                                        "date",
                                        "time",
                                        "date-time",
                                        "duration",
                                        "ipv6",
                                        "hostname",
                                        "uuid",
                                        "uri",
                                        "uri-reference",
                                        "uri-template",
                                        "json-pointer",
                                        "relative-json-pointer"};

[[noreturn]] void refuse_schema(const std::string& path, const std::string& why) {
  throw InputError(
      fmt::format("the JSON schema cannot be used: {} at \"{}\"", why, path.empty() ? "#" : path));
}

class SchemaCheck {
 public:
  explicit SchemaCheck(const ordered_json& root) : root_(root) {}

  ordered_json checked(const ordered_json& schema, const std::string& path, int depth) {
    if (depth > kMostDepth) {
      refuse_schema(path, fmt::format("schemas are more than {} deep", kMostDepth));
    }
    if (schema.is_boolean()) return schema;
    if (!schema.is_object())
      refuse_schema(path, "a schema is an object or true or false, not this");
    check_keywords(schema, path);
    ordered_json out = schema;
    for (auto& [keyword, value] : out.items()) {
      const std::string at = path + "/" + keyword;
      if (keyword == "properties" || keyword == "patternProperties" || keyword == "$defs" ||
          keyword == "definitions") {
        if (!value.is_object()) refuse_schema(at, "an object is expected");
        for (auto& [name, inner] : value.items()) {
          inner = checked(inner, at + "/" + name, depth + 1);
        }
      } else if (keyword == "anyOf" || keyword == "oneOf" || keyword == "allOf" ||
                 keyword == "prefixItems") {
        if (!value.is_array() || value.empty()) refuse_schema(at, "a list of schemas is expected");
        for (size_t i = 0; i < value.size(); ++i) {
          value[i] = checked(value[i], fmt::format("{}/{}", at, i), depth + 1);
        }
      } else if (keyword == "items" || keyword == "additionalProperties" ||
                 keyword == "propertyNames" || keyword == "unevaluatedItems" ||
                 keyword == "unevaluatedProperties") {
        value = checked(value, at, depth + 1);
      }
    }
    // The library would write control characters into a text that has lengths, so a pattern stands
    // for them.
    if (may_be(schema, "string") &&
        (schema.contains("minLength") || schema.contains("maxLength"))) {
      const auto length = [&](const char* keyword) {
        const auto found = schema.find(keyword);
        if (found == schema.end()) return std::string();
        if (!found->is_number_unsigned())
          refuse_schema(path + "/" + keyword, "a length is expected");
        return found->dump();
      };
      const std::string least = length("minLength"), most = length("maxLength");
      out.erase("minLength");
      out.erase("maxLength");
      out["pattern"] =
          fmt::format("^[^\"\\\\\\x00-\\x1f]{{{},{}}}$", least.empty() ? "0" : least, most);
    }
    // What the schema leaves open is said, because the library closes it in calls of tools.
    if (may_be(schema, "object") && !schema.contains("additionalProperties") &&
        !schema.contains("unevaluatedProperties") && !schema.contains("patternProperties") &&
        !schema.contains("propertyNames")) {
      out["additionalProperties"] = !is_closed(schema);
    }
    if (may_be(schema, "array") && !schema.contains("items") &&
        !schema.contains("unevaluatedItems")) {
      out["items"] = !schema.contains("prefixItems") || schema.contains("minItems");
    }
    return out;
  }

 private:
  static std::vector<std::string> types_of(const ordered_json& schema, const std::string& path) {
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

  // Whether the schema's own type, which it names, is or may be this one.
  static bool may_be(const ordered_json& schema, const char* name) {
    const auto type = schema.find("type");
    if (type == schema.end()) return false;
    for (const char* other : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
      if (schema.contains(other)) return false;
    }
    if (!type->is_array()) return *type == name;
    for (const ordered_json& one : *type) {
      if (one == name) return true;
    }
    return false;
  }

  void check_keywords(const ordered_json& schema, const std::string& path) const {
    const std::vector<std::string> types = types_of(schema, path);
    // The library looks at one of these, in this order, and at nothing else beside it.
    static constexpr std::array kSole = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};
    const char* sole = nullptr;
    for (const char* keyword : kSole) {
      if (sole == nullptr && schema.contains(keyword)) sole = keyword;
    }
    for (const auto& [keyword, value] : schema.items()) {
      const std::string at = path + "/" + keyword;
      if (kAnnotations.contains(keyword)) continue;
      const bool about_values = kOfNumbers.contains(keyword) || kOfStrings.contains(keyword) ||
                                kOfArrays.contains(keyword) || kOfObjects.contains(keyword);
      if (!about_values && !kApplicators.contains(keyword)) {
        refuse_schema(at, fmt::format("the keyword \"{}\" is not supported", keyword));
      }
      if (sole != nullptr && keyword != sole && !is_implied(schema, sole, keyword, types)) {
        refuse_schema(at, fmt::format("\"{}\" beside \"{}\" is not supported", keyword, sole));
      }
    }
    if (sole == nullptr) check_constraints(schema, path, types);
    if (const auto all = schema.find("allOf"); all != schema.end() && all->size() > 1) {
      refuse_schema(path + "/allOf", "\"allOf\" of several schemas is not supported");
    }
    if (const auto ref = schema.find("$ref"); ref != schema.end()) check_reference(*ref, path);
    if (const auto list = schema.find("enum"); list != schema.end()) {
      if (!list->is_array() || list->empty()) {
        refuse_schema(path + "/enum", "a list of values is expected");
      }
    }
  }

  // A type beside a constant or an enumeration says nothing if all its values are of that type.
  static bool is_implied(const ordered_json& schema, const std::string& sole,
                         const std::string& keyword, const std::vector<std::string>& types) {
    if (keyword != "type" || (sole != "const" && sole != "enum")) return false;
    const ordered_json values =
        sole == "const" ? ordered_json::array({schema["const"]}) : schema["enum"];
    const auto is_of = [&](const ordered_json& value) {
      for (const std::string& type : types) {
        if ((type == "null" && value.is_null()) || (type == "boolean" && value.is_boolean()) ||
            (type == "object" && value.is_object()) || (type == "array" && value.is_array()) ||
            (type == "string" && value.is_string()) || (type == "number" && value.is_number()) ||
            (type == "integer" && value.is_number_integer())) {
          return true;
        }
      }
      return false;
    };
    for (const ordered_json& value : values) {
      if (!is_of(value)) return false;
    }
    return true;
  }

  static void check_constraints(const ordered_json& schema, const std::string& path,
                                const std::vector<std::string>& types) {
    const auto has_type = [&](const char* name) {
      for (const std::string& type : types) {
        if (type == name) return true;
      }
      return false;
    };
    for (const auto& [keyword, value] : schema.items()) {
      const std::string at = path + "/" + keyword;
      const char* needs = kOfNumbers.contains(keyword)   ? "number"
                          : kOfStrings.contains(keyword) ? "string"
                          : kOfArrays.contains(keyword)  ? "array"
                          : kOfObjects.contains(keyword) ? "object"
                                                         : nullptr;
      if (needs == nullptr) continue;
      // Without a type every value that is none of these would validate, and the library writes
      // none of the others.
      if (types.empty()) {
        refuse_schema(at, fmt::format("\"{}\" needs \"type\" beside it", keyword));
      }
      if (!has_type(needs) && !(std::string_view(needs) == "number" && has_type("integer")))
        continue;
      if (keyword == "multipleOf" && has_type("number")) {
        refuse_schema(at, "\"multipleOf\" is supported for the type \"integer\" alone");
      }
    }
    if (has_type("string")) {
      const bool lengths = schema.contains("minLength") || schema.contains("maxLength");
      for (const char* whole : {"pattern", "format"}) {
        if (lengths && schema.contains(whole)) {
          refuse_schema(
              path + "/" + whole,
              fmt::format("\"{}\" beside \"minLength\" or \"maxLength\" is not supported", whole));
        }
      }
      if (schema.contains("pattern") && schema.contains("format")) {
        refuse_schema(path + "/format", "\"format\" beside \"pattern\" is not supported");
      }
      if (const auto format = schema.find("format"); format != schema.end()) {
        if (!format->is_string() || !kFormats.contains(format->get<std::string>())) {
          refuse_schema(path + "/format", "the format " + format->dump() + " is not supported");
        }
      }
      if (const auto pattern = schema.find("pattern");
          pattern != schema.end() && !pattern->is_string()) {
        refuse_schema(path + "/pattern", "a text is expected");
      }
    }
    if (const auto required = schema.find("required"); required != schema.end()) {
      bool is_list = required->is_array();
      for (const ordered_json& name : *required) is_list &= name.is_string();
      if (!is_list) refuse_schema(path + "/required", "a list of names is expected");
    }
    for (const char* key : {"patternProperties", "propertyNames"}) {
      if (!schema.contains(key)) continue;
      for (const char* other :
           {"properties", "additionalProperties", "required", "patternProperties"}) {
        if (std::string_view(other) != key && schema.contains(other) &&
            !(std::string_view(other) == "additionalProperties" && schema[other] == false)) {
          refuse_schema(path + "/" + key,
                        fmt::format("\"{}\" beside \"{}\" is not supported", key, other));
        }
      }
    }
  }

  void check_reference(const ordered_json& reference, const std::string& path) const {
    const std::string at = path + "/$ref";
    if (!reference.is_string()) refuse_schema(at, "a text is expected");
    const std::string text = reference.get<std::string>();
    if (text == "#") return;
    if (!text.starts_with("#/")) {
      refuse_schema(at, fmt::format("the reference \"{}\" leads outside the schema", text));
    }
    if (text.find_first_of("~%") != std::string::npos) {
      refuse_schema(at, fmt::format("the reference \"{}\" has escaped characters", text));
    }
    const auto pointer = ordered_json::json_pointer(text.substr(1));
    if (!root_.contains(pointer)) {
      refuse_schema(at, fmt::format("the reference \"{}\" leads nowhere", text));
    }
  }

  static bool is_closed(const ordered_json& schema) {
    const auto properties = schema.find("properties");
    if (properties == schema.end() || !properties->is_object()) return false;
    for (const char* other : {"additionalProperties", "patternProperties", "propertyNames",
                              "unevaluatedProperties", "minProperties"}) {
      if (schema.contains(other)) return false;
    }
    if (const auto required = schema.find("required"); required != schema.end()) {
      for (const ordered_json& name : *required) {
        if (!properties->contains(name.get<std::string>())) return false;
      }
    }
    return true;
  }

  const ordered_json& root_;
};

}  // namespace

ordered_json checked_json_schema(const ordered_json& schema) {
  return SchemaCheck(schema).checked(schema, "", 0);
}

std::string checked_json_schema(std::string_view schema, const std::string& name) {
  TWELL_REQUIRE(schema.size() <= kMostSchemaBytes,
                "{}: a JSON schema of {} bytes, at most {} are taken", name, schema.size(),
                kMostSchemaBytes);
  return checked_json_schema(parse_ordered_json(schema, name)).dump();
}

}  // namespace twell
