// SPDX-License-Identifier: Apache-2.0
// References of JSON schemas (JSON Schema Core, "Base URI, Anchors, and Dereferencing").
#pragma once

#include <nlohmann/json.hpp>

namespace twell::json_schema {

// The schema with references by the "$id" of a schema within it, or by an "$anchor", as pointers
// from the root. Other references stay.
nlohmann::ordered_json with_plain_references(const nlohmann::ordered_json& root);

}  // namespace twell::json_schema
