// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/json_part.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace {

using nlohmann::json;

bool asks_for_nothing(const json& value) {
  if (value.is_null() || (value.is_boolean() && !value.get<bool>())) return true;
  if (value.is_string()) return value.get_ref<const std::string&>().empty();
  return value.is_structured() && value.empty();
}

}  // namespace

std::string excerpt(std::string_view text) {
  constexpr size_t kLongest = 60;
  const std::string shown(text.substr(0, kLongest));
  return json(shown).dump(-1, ' ', true, json::error_handler_t::replace) +
         (text.size() > kLongest ? "..." : "");
}

int32_t json_to_id(const json& value, const std::string& where) {
  const bool usable =
      value.is_number_unsigned() &&
      value.get<uint64_t>() < static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
  TWELL_REQUIRE(usable, "{} is not a token id (an integer from 0 to 2^31 - 2)", where);
  return value.get<int32_t>();
}

JsonPart::JsonPart(const json& value, std::string where) : value_(value), where_(std::move(where)) {
  TWELL_REQUIRE(value.is_object(), "{} is not an object", where_);
}

const json* JsonPart::find(std::string_view name) const {
  const auto field = value_.find(std::string(name));
  return field == value_.end() || field->is_null() ? nullptr : &*field;
}

const json& JsonPart::required(std::string_view name) const {
  const json* field = find(name);
  TWELL_REQUIRE(field != nullptr, "{} has no \"{}\"", where_, name);
  return *field;
}

const json& JsonPart::array(std::string_view name) const {
  const json& field = required(name);
  TWELL_REQUIRE(field.is_array(), "{}: \"{}\" is not an array", where_, name);
  return field;
}

const json& JsonPart::object(std::string_view name) const {
  const json& field = required(name);
  TWELL_REQUIRE(field.is_object(), "{}: \"{}\" is not an object", where_, name);
  return field;
}

std::string JsonPart::string(std::string_view name) const {
  const json& field = required(name);
  TWELL_REQUIRE(field.is_string(), "{}: \"{}\" is not a string", where_, name);
  return field.get<std::string>();
}

std::string JsonPart::string_or_empty(std::string_view name) const {
  return find(name) == nullptr ? std::string() : string(name);
}

bool JsonPart::boolean(std::string_view name, bool missing) const {
  const json* field = find(name);
  if (field == nullptr) return missing;
  TWELL_REQUIRE(field->is_boolean(), "{}: \"{}\" is not true or false", where_, name);
  return field->get<bool>();
}

int32_t JsonPart::id(std::string_view name) const {
  return json_to_id(required(name), fmt::format("{}: \"{}\"", where_, name));
}

void JsonPart::must_be_off(std::string_view name) const {
  const json* field = find(name);
  TWELL_REQUIRE(field == nullptr || asks_for_nothing(*field), "{}: \"{}\" is not supported", where_,
                name);
}

void JsonPart::finish(std::initializer_list<std::string_view> understood) const {
  for (const auto& [name, value] : value_.items()) {
    const bool known = std::find(understood.begin(), understood.end(), name) != understood.end();
    TWELL_REQUIRE(known || asks_for_nothing(value), "{}: the field {} is not supported", where_,
                  excerpt(name));
  }
}

}  // namespace twell
