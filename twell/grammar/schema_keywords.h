// SPDX-License-Identifier: Apache-2.0
// Keywords of JSON schemas by what they are about, and refusals that name a place in a schema.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "twell/base/error.h"

namespace twell::json_schema {

// Keywords that say nothing about what validates.
inline const std::set<std::string> kAnnotations = {"$schema",
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
inline const std::set<std::string> kApplicators = {"type",  "enum",  "const", "anyOf",
                                                   "oneOf", "allOf", "$ref"};
inline const std::set<std::string> kOfNumbers = {"minimum", "maximum", "exclusiveMinimum",
                                                 "exclusiveMaximum", "multipleOf"};
inline const std::set<std::string> kOfStrings = {"minLength", "maxLength", "pattern", "format"};
inline const std::set<std::string> kOfArrays = {"items", "prefixItems", "minItems", "maxItems",
                                                "unevaluatedItems"};
inline const std::set<std::string> kOfObjects = {
    "properties",    "required",      "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties",        "unevaluatedProperties"};

inline constexpr int64_t kMostMultiple = 1024;    // of "multipleOf" that the library takes
inline constexpr size_t kMostAlternatives = 256;  // of conditions beside each other

// The JSON schema cannot be used, for the reason `why` at the pointer `path`.
[[noreturn]] void refuse_schema(const std::string& path, const std::string& why);

// No value validates, so that an alternative with this schema can be left out.
class NothingFits : public InputError {
 public:
  using InputError::InputError;
};
[[noreturn]] void nothing_fits(const std::string& path, const std::string& why);

bool is_of_type(const nlohmann::ordered_json& value, const std::string& type);

// The types that a schema at `path` names; empty: none.
std::vector<std::string> types_of(const nlohmann::ordered_json& schema, const std::string& path);

}  // namespace twell::json_schema
