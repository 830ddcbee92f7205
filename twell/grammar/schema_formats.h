// SPDX-License-Identifier: Apache-2.0
// Formats of strings in JSON schemas ("format"). The library writes some of them; of others its
// patterns are too wide (a 31st of November, labels of 200 characters in a host's name), so these
// are patterns of our own, all of whose texts are of the format.
// Source: JSON Schema, "Vocabularies for Semantic Content With format"; RFC 3339, RFC 1123.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace twell::json_schema {

bool is_known_format(std::string_view format);

// The regular expression of a format that the library is not left to write.
std::optional<std::string> pattern_of_format(std::string_view format);

}  // namespace twell::json_schema
