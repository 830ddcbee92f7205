// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/json_schema.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/grammar/schema_formats.h"
#include "twell/grammar/schema_keywords.h"
#include "twell/grammar/schema_merge.h"
#include "twell/grammar/schema_references.h"

namespace twell {
namespace {

using namespace json_schema;
using nlohmann::ordered_json;

constexpr int kMostDepth = 24;       // of schemas within each other
constexpr int kMostMerged = 20000;   // schemas that are merged into others
constexpr uint64_t kMostItems = 64;  // of an array that contains something

// A character that stands in a JSON text as it is: no quote, backslash, control character, and none
// that UTF-8 does not have (U+D800 to U+DFFF).
constexpr const char* kCharacter = "[ !#-\\[\\]-\xED\x9F\xBF\xEE\x80\x80-\xF4\x8F\xBF\xBF]";

class SchemaCheck {
 public:
  explicit SchemaCheck(const ordered_json& root) : root_(root) { look_for_references(root); }

  ordered_json checked(const ordered_json& given, const std::string& path, int depth) {
    if (depth > kMostDepth) {
      refuse_schema(path, fmt::format("schemas are more than {} deep", kMostDepth));
    }
    if (given.is_boolean()) return given;
    if (!given.is_object()) refuse_schema(path, "a schema is an object or true or false, not this");
    const ordered_json schema = simplified(given, path, depth);
    check_keywords(schema, path);
    check_range(schema, path);
    ordered_json out = schema;
    for (auto& [keyword, value] : out.items()) {
      const std::string at = path + "/" + keyword;
      if (keyword == "properties") {
        value = checked_properties(schema, value, at, depth);
      } else if (keyword == "patternProperties" || keyword == "$defs" || keyword == "definitions") {
        if (!value.is_object()) refuse_schema(at, "an object is expected");
        for (auto& [name, inner] : value.items()) {
          inner = checked(inner, at + "/" + name, depth + 1);
        }
      } else if (keyword == "anyOf" || keyword == "oneOf" || keyword == "allOf" ||
                 keyword == "prefixItems") {
        value = checked_list(value, at, depth, keyword == "anyOf" || keyword == "oneOf");
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
      out["pattern"] = fmt::format("^{}{{{},{}}}$", kCharacter, least.empty() ? "0" : least, most);
    }
    if (const auto format = out.find("format"); format != out.end() && may_be(schema, "string")) {
      if (const auto pattern = pattern_of_format(format->get<std::string>())) {
        out.erase("format");
        out["pattern"] = *pattern;
      }
    }
    // What the schema leaves open is said, because the library closes it in calls of tools.
    if (may_be(schema, "object") && !schema.contains("additionalProperties") &&
        !schema.contains("unevaluatedProperties") && !schema.contains("patternProperties") &&
        !schema.contains("propertyNames")) {
      out["additionalProperties"] = !is_closed(schema);
      if (out["additionalProperties"] == true && out.contains("properties")) {
        for (const auto& [name, value] : schema["properties"].items()) {
          if (!out["properties"].contains(name)) {
            refuse_schema(path + "/properties/" + name,
                          "a property that must be absent from an open object is not supported");
          }
        }
      }
    }
    if (may_be(schema, "object")) list_required(out, path);
    if (may_be(schema, "array") && !schema.contains("items") &&
        !schema.contains("unevaluatedItems")) {
      out["items"] = !schema.contains("prefixItems") || schema.contains("minItems");
    }
    return out;
  }

 private:
  ordered_json checked_properties(const ordered_json& schema, const ordered_json& properties,
                                  const std::string& at, int depth) {
    if (!properties.is_object()) refuse_schema(at, "an object is expected");
    ordered_json out = ordered_json::object();
    for (const auto& [name, inner] : properties.items()) {
      try {
        if (inner == false) nothing_fits(at + "/" + name, "the schema is false");
        out[name] = checked(inner, at + "/" + name, depth + 1);
      } catch (const NothingFits&) {
        // Such a property is absent, and the object takes no others than those that are listed.
        if (is_required(schema, name)) throw;
        if (schema.contains("additionalProperties") && schema["additionalProperties"] != false) {
          throw;
        }
      }
    }
    return out;
  }

  // The library does not see to names that are required and not listed.
  static void list_required(ordered_json& schema, const std::string& path) {
    const auto required = schema.find("required");
    if (required == schema.end()) return;
    const ordered_json others = schema.value("additionalProperties", ordered_json(true));
    for (const ordered_json& name : ordered_json(*required)) {
      if (schema.contains("properties") && schema["properties"].contains(name.get<std::string>())) {
        continue;
      }
      if (others == false) nothing_fits(path + "/required", name.dump() + " is excluded");
      schema["properties"][name.get<std::string>()] = others;
    }
  }

  // Alternatives that no value fits are left out.
  ordered_json checked_list(const ordered_json& list, const std::string& at, int depth,
                            bool alternatives) {
    if (!list.is_array() || list.empty()) refuse_schema(at, "a list of schemas is expected");
    ordered_json out = ordered_json::array();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string place = fmt::format("{}/{}", at, i);
      try {
        if (list[i] == false) nothing_fits(place, "the schema is false");
        const ordered_json one = checked(list[i], place, depth + 1);
        // The library takes no "true" in a list.
        out.push_back(one == true ? ordered_json::object() : one);
      } catch (const NothingFits&) {
        if (!alternatives || refers_into_lists_) throw;
      }
    }
    if (out.empty()) nothing_fits(at, "none of the alternatives can be");
    return out;
  }

  // The schema without conditions: "if" with its kin, "dependentRequired" and "dependentSchemas"
  // are alternatives, and "not" what else there is. What remains of "not" excludes a list of
  // values, as
  // {"not": {"enum": [...]}}.
  ordered_json without_conditions(ordered_json schema, const std::string& path, int depth) {
    if (!schema.contains("contains")) {
      for (const char* keyword : {"minContains", "maxContains"}) schema.erase(keyword);
    }
    ordered_json all = ordered_json::array();
    const auto either = [&](const ordered_json& one, const ordered_json& other) {
      all.push_back({{"anyOf", ordered_json::array({one, other})}});
    };
    const auto absent = [](const std::string& name) {
      return ordered_json{{"properties", {{name, false}}}};
    };
    const auto present = [](const std::string& name) {
      return ordered_json{{"type", "object"}, {"required", ordered_json::array({name})}};
    };
    if (schema.contains("if") && (schema.contains("then") || schema.contains("else"))) {
      const ordered_json condition = schema["if"];
      const auto part = [&](const char* keyword) {
        return schema.value(keyword, ordered_json(true));
      };
      either(both_of(condition, part("then")),
             both_of(negated(condition, path + "/if", depth + 1), part("else")));
    }
    for (const char* keyword : {"if", "then", "else"}) schema.erase(keyword);
    if (const auto no = schema.find("not"); no != schema.end() && !lists_values(*no)) {
      const ordered_json rest = negated(*no, path + "/not", depth + 1);
      schema.erase("not");
      if (rest.is_object() && rest.size() == 1 && rest.contains("not") &&
          lists_values(rest["not"])) {
        schema["not"] = rest["not"];
      } else {
        all.push_back(rest);
      }
    }
    for (const char* keyword : {"dependentRequired", "dependentSchemas"}) {
      const auto found = schema.find(keyword);
      if (found == schema.end()) continue;
      if (!found->is_object()) refuse_schema(path + "/" + keyword, "an object is expected");
      for (const auto& [name, value] : found->items()) {
        const ordered_json then = value.is_array() ? ordered_json{{"required", value}} : value;
        either(absent(name), both_of(present(name), then));
      }
      schema.erase(keyword);
    }
    if (all.empty()) return schema;
    if (!schema.contains("allOf")) schema["allOf"] = ordered_json::array();
    if (schema["allOf"].is_array()) {
      for (ordered_json& one : all) schema["allOf"].push_back(std::move(one));
    }
    return schema;
  }

  static bool lists_values(const ordered_json& schema) {
    return schema.is_object() && schema.size() == 1 && schema.contains("enum") &&
           schema["enum"].is_array() && !schema["enum"].empty();
  }

  // The schema whose values are those that do not validate by this one.
  ordered_json negated(const ordered_json& schema, const std::string& path, int depth) {
    if (depth > kMostDepth || ++merged_ > kMostMerged) {
      refuse_schema(path, fmt::format("schemas are more than {} deep", kMostDepth));
    }
    if (schema.is_boolean()) return !schema.get<bool>();
    if (!schema.is_object())
      refuse_schema(path, "a schema is an object or true or false, not this");
    if (is_unevaluated_) {
      // A schema that does not hold evaluates nothing; merged, its properties would count.
      refuse_schema(path, "a negation in a schema with \"unevaluated...\" is not supported");
    }
    ordered_json any = ordered_json::array();
    for (const auto& [keyword, bound] : schema.items()) {
      if (kAnnotations.contains(keyword)) continue;
      const std::string at = path + "/" + keyword;
      if (keyword == "const" || keyword == "enum") {
        const ordered_json values = keyword == "enum" ? bound : ordered_json::array({bound});
        if (!values.is_array() || values.empty()) refuse_schema(at, "a list of values is expected");
        any.push_back({{"not", {{"enum", values}}}});
      } else if (keyword == "type") {
        any.push_back(other_types(schema, path));
      } else if (keyword == "required" && bound.is_array()) {
        for (const ordered_json& name : bound) {
          if (!name.is_string()) refuse_schema(at, "a list of names is expected");
          any.push_back({{"type", "object"}, {"properties", {{name.get<std::string>(), false}}}});
        }
      } else if (keyword == "properties" && bound.is_object()) {
        for (const auto& [name, value] : bound.items()) {
          any.push_back({{"type", "object"},
                         {"properties", {{name, negated(value, at + "/" + name, depth + 1)}}},
                         {"required", ordered_json::array({name})}});
        }
      } else if (keyword == "not") {
        any.push_back(bound);
      } else if ((keyword == "allOf" || keyword == "anyOf") && bound.is_array()) {
        ordered_json each = ordered_json::array();
        for (size_t i = 0; i < bound.size(); ++i) {
          each.push_back(negated(bound[i], fmt::format("{}/{}", at, i), depth + 1));
        }
        if (keyword == "allOf") {
          any.insert(any.end(), each.begin(), each.end());
        } else {
          any.push_back({{"allOf", each}});
        }
      } else if (keyword == "$ref") {
        check_reference(bound, path);
        const auto pointer =
            ordered_json::json_pointer(bound.get_ref<const std::string&>().substr(1));
        any.push_back(negated(root_[pointer], at, depth + 1));
      } else if (const char* opposite = opposite_of(keyword);
                 opposite != nullptr && bound.is_number()) {
        any.push_back({{"type", "number"}, {opposite, bound}});
      } else {
        refuse_schema(at, fmt::format("\"{}\" that must not hold is not supported", keyword));
      }
    }
    for (const ordered_json& one : any) {
      if (one == true) return true;
    }
    std::erase(any.get_ref<ordered_json::array_t&>(), ordered_json(false));
    if (any.empty()) return false;
    return any.size() == 1 ? any[0] : ordered_json{{"anyOf", any}};
  }

  static const char* opposite_of(const std::string& keyword) {
    if (keyword == "minimum") return "exclusiveMaximum";
    if (keyword == "maximum") return "exclusiveMinimum";
    if (keyword == "exclusiveMinimum") return "maximum";
    return keyword == "exclusiveMaximum" ? "minimum" : nullptr;
  }

  // No number fits, as in an alternative of a condition that does not hold.
  static void check_range(const ordered_json& schema, const std::string& path) {
    const std::vector<std::string> types = types_of(schema, path);
    const bool whole = std::ranges::find(types, "number") == types.end();
    for (const std::string& type : types) {
      if (type != "integer" && type != "number") return;
    }
    const auto bound = [&](const char* keyword) {
      const auto found = schema.find(keyword);
      return found != schema.end() && found->is_number() ? std::optional(found->get<double>())
                                                         : std::nullopt;
    };
    const auto minimum = bound("minimum"), above = bound("exclusiveMinimum");
    const auto maximum = bound("maximum"), below = bound("exclusiveMaximum");
    const double gap = whole ? 1.0 : 0.0;  // from a bound that is excluded to the next number
    if ((minimum && maximum && *minimum > *maximum) ||
        (above && maximum && (*above >= *maximum || *above + gap > *maximum)) ||
        (minimum && below && (*minimum >= *below || *minimum > *below - gap)) ||
        (above && below && (*above >= *below || *above + gap > *below - gap))) {
      nothing_fits(path, "its bounds exclude every number");
    }
  }

  static ordered_json other_types(const ordered_json& schema, const std::string& path) {
    const std::vector<std::string> types = types_of(schema, path);
    const auto has = [&](const char* type) {
      return std::ranges::find(types, type) != types.end();
    };
    if (has("integer") && !has("number")) {
      refuse_schema(path + "/type", "numbers that are not whole are not supported");
    }
    ordered_json others = ordered_json::array();
    for (const char* type : {"null", "boolean", "object", "array", "number", "string"}) {
      if (!has(type)) others.push_back(type);
    }
    return others.empty() ? ordered_json(false) : ordered_json{{"type", others}};
  }

  // "contains" as alternatives: at each place of an array of bounded length is such an item.
  static void place_contained(ordered_json& schema, const std::string& path) {
    const auto refuse = [&](const char* keyword, const char* why) {
      refuse_schema(path + "/" + keyword, why);
    };
    if (schema.contains("maxContains")) {
      refuse("maxContains", "the keyword \"maxContains\" is not supported");
    }
    const ordered_json least = schema.value("minContains", ordered_json(1));
    if (least != 0 && least != 1) {
      refuse("minContains", "a \"minContains\" of more than 1 is not supported");
    }
    uint64_t most = kMostItems + 1;
    if (const auto items = schema.find("maxItems");
        items != schema.end() && items->is_number_unsigned()) {
      most = items->get<uint64_t>();
    }
    if (schema.value("items", ordered_json(true)) == false) {
      const ordered_json first = schema.value("prefixItems", ordered_json::array());
      most = std::min<uint64_t>(most, first.size());
    }
    const ordered_json contained = schema["contains"];
    schema.erase("contains");
    schema.erase("minContains");
    if (least == 0) return;
    if (most > kMostItems) {
      refuse("contains",
             "\"contains\" is supported for arrays of at most 64 items (\"maxItems\") alone");
    }
    ordered_json places = ordered_json::array();
    ordered_json first = ordered_json::array();
    for (uint64_t i = 0; i < most; ++i) {
      first.push_back(contained);
      places.push_back({{"prefixItems", first}, {"minItems", i + 1}});
      first.back() = true;
    }
    if (places.empty()) nothing_fits(path + "/contains", "the array is empty");
    merge(schema, {{"anyOf", places}}, path);
  }

  // Drops values that "not" excludes and other keywords exclude already, and lists those of a type
  // that has few.
  static void exclude_values(ordered_json& schema, const std::string& path) {
    const auto no = schema.find("not");
    if (no == schema.end()) return;
    const auto excluded_already = [&](const ordered_json& value) {
      for (const auto& [keyword, bound] : schema.items()) {
        if (keyword == "not" || kAnnotations.contains(keyword)) continue;
        if (fits(value, keyword, bound, schema, path) == false) return true;
      }
      return false;
    };
    ordered_json left = ordered_json::array();
    for (const ordered_json& value : (*no)["enum"]) {
      if (!excluded_already(value)) left.push_back(value);
    }
    if (left.empty()) {
      schema.erase("not");
      return;
    }
    (*no)["enum"] = std::move(left);
    const std::vector<std::string> types = types_of(schema, path);
    const bool few = !types.empty() && std::ranges::all_of(types, [](const std::string& type) {
      return type == "null" || type == "boolean";
    });
    if (few && !schema.contains("const") && !schema.contains("enum")) {
      schema["enum"] = {nullptr, false, true};
    }
  }

  // What the library reads by itself: a schema without keywords beside "$ref", "allOf", "anyOf",
  // "oneOf", "const" and "enum", and with a type where keywords need one. It may take fewer values,
  // and takes no others.
  ordered_json simplified(const ordered_json& given, const std::string& path, int depth) {
    ordered_json schema = given;
    const auto has = [&](const char* keyword) { return schema.contains(keyword); };
    // Keywords that say nothing by themselves.
    if (has("uniqueItems") && schema["uniqueItems"] == false) schema.erase("uniqueItems");
    if (has("propertyNames") && schema["propertyNames"] == true) schema.erase("propertyNames");
    // A list of "items" is what drafts before 2020-12 call "prefixItems".
    if (has("items") && schema["items"].is_array() && !has("prefixItems")) {
      schema["prefixItems"] = schema["items"];
      schema.erase("items");
      if (has("additionalItems")) schema["items"] = schema["additionalItems"];
    }
    schema.erase("additionalItems");
    schema = without_conditions(std::move(schema), path, depth);
    const bool several = has("allOf") && schema["allOf"].is_array() && schema["allOf"].size() > 1;
    if (several || ((has("allOf") || has("$ref")) && keywords_of(schema) > 1)) {
      schema = flat(schema, path, depth);
    }
    if (has("contains")) place_contained(schema, path);
    exclude_values(schema, path);
    for (const char* list : {"anyOf", "oneOf"}) {
      if (has(list) && keywords_of(schema) > 1) return distributed(schema, list, path, depth);
    }
    if ((has("const") || has("enum")) && keywords_of(schema) > 1) filter_values(schema, path);
    if (!has("type")) add_type(schema);
    // Nothing but the schema's own keywords evaluates anything now.
    for (const auto& [unevaluated, others] :
         {std::pair("unevaluatedProperties", "additionalProperties"),
          std::pair("unevaluatedItems", "items")}) {
      if (!has(unevaluated)) continue;
      if (!has(others)) schema[others] = schema[unevaluated];
      schema.erase(unevaluated);
    }
    return schema;
  }

  static int64_t keywords_of(const ordered_json& schema) {
    int64_t count = 0;
    for (const auto& [keyword, value] : schema.items()) count += !kAnnotations.contains(keyword);
    return count;
  }

  // Without a type, a keyword holds for values of its type and lets all others pass; answers are of
  // a type that some keyword is about.
  static void add_type(ordered_json& schema) {
    for (const char* sole : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
      if (schema.contains(sole)) return;
    }
    ordered_json types = ordered_json::array();
    const std::pair<const std::set<std::string>*, const char*> kinds[] = {{&kOfObjects, "object"},
                                                                          {&kOfArrays, "array"},
                                                                          {&kOfStrings, "string"},
                                                                          {&kOfNumbers, "number"}};
    for (const auto& [keywords, type] : kinds) {
      for (const auto& [keyword, value] : schema.items()) {
        if (!keywords->contains(keyword)) continue;
        types.push_back(type);
        break;
      }
    }
    if (types.size() == 1) schema["type"] = types[0];
    if (types.size() > 1) schema["type"] = types;
  }

  // The schema without "$ref" and "allOf" at its top, whose schemas are merged into it.
  ordered_json flat(const ordered_json& given, const std::string& path, int depth) {
    if (depth > kMostDepth || ++merged_ > kMostMerged) {
      refuse_schema(path,
                    "schemas that refer to themselves beside other keywords are not supported");
    }
    if (given.is_boolean()) return given;
    if (!given.is_object()) refuse_schema(path, "a schema is an object or true or false, not this");
    const ordered_json schema = without_conditions(given, path, depth);
    ordered_json out = schema;
    out.erase("$ref");
    out.erase("allOf");
    if (const auto ref = schema.find("$ref"); ref != schema.end()) {
      check_reference(*ref, path);
      const auto pointer = ordered_json::json_pointer(ref->get_ref<const std::string&>().substr(1));
      merge(out, flat(root_[pointer], path + "/$ref", depth + 1), path + "/$ref");
    }
    if (const auto all = schema.find("allOf"); all != schema.end()) {
      if (!all->is_array() || all->empty()) {
        refuse_schema(path + "/allOf", "a list of schemas is expected");
      }
      for (size_t i = 0; i < all->size(); ++i) {
        const std::string at = fmt::format("{}/allOf/{}", path, i);
        merge(out, flat((*all)[i], at, depth + 1), at);
      }
    }
    return out;
  }

  // Alternatives with what stands beside them in each.
  ordered_json distributed(const ordered_json& schema, const std::string& keyword,
                           const std::string& path, int depth) {
    ordered_json rest = ordered_json::object(), out = ordered_json::object();
    for (const auto& [key, value] : schema.items()) {
      if (key != keyword) (kAnnotations.contains(key) ? out : rest)[key] = value;
    }
    const ordered_json& list = schema[keyword];
    if (!list.is_array() || list.empty()) {
      refuse_schema(path + "/" + keyword, "a list of schemas is expected");
    }
    out[keyword] = ordered_json::array();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string at = fmt::format("{}/{}/{}", path, keyword, i);
      ordered_json one = rest;
      try {
        merge(one, flat(list[i], at, depth + 1), at);
        out[keyword].push_back(std::move(one));
      } catch (const NothingFits&) {
        if (refers_into_lists_) throw;
      }
    }
    if (out[keyword].empty()) nothing_fits(path + "/" + keyword, "none of the alternatives can be");
    return out;
  }

  static bool is_required(const ordered_json& schema, const std::string& name) {
    const auto required = schema.find("required");
    return required != schema.end() && required->is_array() &&
           std::ranges::find(*required, ordered_json(name)) != required->end();
  }

  // References into lists keep alternatives where they are.
  void look_for_references(const ordered_json& value) {
    if (value.is_array()) {
      for (const ordered_json& one : value) look_for_references(one);
    }
    if (!value.is_object()) return;
    for (const auto& [key, inner] : value.items()) {
      if (key == "$ref" && inner.is_string()) {
        const auto& text = inner.get_ref<const std::string&>();
        refers_into_lists_ |=
            text.find("/anyOf/") != text.npos || text.find("/oneOf/") != text.npos;
      }
      is_unevaluated_ |= key == "unevaluatedProperties" || key == "unevaluatedItems";
      look_for_references(inner);
    }
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
      return std::ranges::any_of(types,
                                 [&](const std::string& type) { return is_of_type(value, type); });
    };
    for (const ordered_json& value : values) {
      if (!is_of(value)) return false;
    }
    return true;
  }

  // A control character is written as an escape in JSON, which the library does not do.
  static void check_pattern(const ordered_json& pattern, const std::string& at) {
    if (!pattern.is_string()) refuse_schema(at, "a text is expected");
    const auto& text = pattern.get_ref<const std::string&>();
    bool control = std::ranges::any_of(text, [](char c) { return c >= 0 && c < ' '; });
    for (const char* escape :
         {"\\c", "\\t", "\\n", "\\r", "\\f", "\\v", "\\0", "\\x0", "\\x1", "\\u000", "\\u001"}) {
      control |= text.find(escape) != text.npos;
    }
    if (control) refuse_schema(at, "a pattern of control characters is not supported");
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
        if (!format->is_string() || !is_known_format(format->get<std::string>())) {
          refuse_schema(path + "/format", "the format " + format->dump() + " is not supported");
        }
      }
      if (const auto pattern = schema.find("pattern"); pattern != schema.end()) {
        check_pattern(*pattern, path + "/pattern");
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
  bool refers_into_lists_ = false, is_unevaluated_ = false;
  int merged_ = 0;
};

}  // namespace

ordered_json checked_json_schema(const ordered_json& schema) {
  const ordered_json plain = with_plain_references(schema);
  return SchemaCheck(plain).checked(plain, "", 0);
}

std::string checked_json_schema(std::string_view schema, const std::string& name) {
  TWELL_REQUIRE(schema.size() <= kMostSchemaBytes,
                "{}: a JSON schema of {} bytes, at most {} are taken", name, schema.size(),
                kMostSchemaBytes);
  return checked_json_schema(parse_ordered_json(schema, name)).dump();
}

}  // namespace twell
