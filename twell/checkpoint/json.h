// SPDX-License-Identifier: Apache-2.0
// JSON from files that may be broken or hostile.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace twell {

// Parses one JSON text. InputError, naming the source, on a syntax error, invalid UTF-8, nesting
// beyond max_depth, or a key that appears twice in one object.
nlohmann::json parse_json(std::string_view text, const std::string& source, int max_depth);

}  // namespace twell
