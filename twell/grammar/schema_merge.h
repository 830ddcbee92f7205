// SPDX-License-Identifier: Apache-2.0
// Schemas beside each other as one: what "allOf", "$ref" and conditions need, since the library
// reads a keyword only where no other stands beside it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace twell::json_schema {

// Makes `a` a schema whose values validate by both. `b` stands at `path`. InputError where a
// keyword cannot be merged, NothingFits where no value validates by both.
void merge(nlohmann::ordered_json& a, const nlohmann::ordered_json& b, const std::string& path);

// A schema whose values validate by both, not merged yet.
nlohmann::ordered_json both_of(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b);

// Whether a value validates by a keyword of the schema at `path`, whose value is `bound`; nothing
// where that is not told here.
std::optional<bool> fits(const nlohmann::ordered_json& value, const std::string& keyword,
                         const nlohmann::ordered_json& bound, const nlohmann::ordered_json& schema,
                         const std::string& path);

// Keeps the values in "const" and "enum" that validate by the keywords beside them, and of those
// keywords the ones that are not told here. NothingFits where no value is left.
void filter_values(nlohmann::ordered_json& schema, const std::string& path);

}  // namespace twell::json_schema
