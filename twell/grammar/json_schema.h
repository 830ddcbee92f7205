// SPDX-License-Identifier: Apache-2.0
// JSON schemas as the grammar library takes them.
//
// In: the text of a schema (JSON Schema, draft 7 and later) of a client. Out: the schema that
// answers are written by, or an InputError that names the keyword, its place and what is allowed.
// The library passes over some keywords in silence; an answer would then not validate, so they are
// refused here.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace twell {

inline constexpr size_t kMostSchemaBytes = 64 << 10;

// Checks the schema. What it leaves open is said by keywords of its own. Objects that list their
// properties and say nothing of others get "additionalProperties": false, as OpenAI's strict
// schemas do, where their required properties are among those listed. A reference beside other
// keywords of validation is refused, as is one that leads outside the schema.
nlohmann::ordered_json checked_json_schema(const nlohmann::ordered_json& schema);
// The same of a text.
std::string checked_json_schema(std::string_view schema, const std::string& name);

}  // namespace twell
