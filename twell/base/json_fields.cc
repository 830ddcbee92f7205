// SPDX-License-Identifier: Apache-2.0
#include "twell/base/json_fields.h"

#include <algorithm>
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

const json& typed(const JsonFields& fields, std::string_view name,
                  bool (json::*is)() const noexcept, std::string_view kind) {
  const json* field = fields.find(name);
  TWELL_REQUIRE(field != nullptr, "{} has no \"{}\"", fields.where(), name);
  TWELL_REQUIRE((field->*is)(), "{}: \"{}\" must be {}, got {}", fields.where(), name, kind,
                show(*field));
  return *field;
}

}  // namespace

std::string json_text(const json& value, int indent) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

std::string show(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text.replace(57, std::string::npos, "...");
  return text;
}

std::string excerpt(std::string_view text) { return show(json(text)); }

JsonFields::JsonFields(const json& value, std::string where)
    : value_(value), where_(std::move(where)) {
  TWELL_REQUIRE(value.is_object(), "{} is not an object", where_);
}

const json* JsonFields::find(std::string_view name) const {
  const auto field = value_.find(std::string(name));
  return field == value_.end() || field->is_null() ? nullptr : &*field;
}

const json& JsonFields::array(std::string_view name) const {
  return typed(*this, name, &json::is_array, "an array");
}

const json& JsonFields::object(std::string_view name) const {
  return typed(*this, name, &json::is_object, "an object");
}

std::string JsonFields::text(std::string_view name, std::optional<std::string> absent) const {
  if (absent && find(name) == nullptr) return *absent;
  return typed(*this, name, &json::is_string, "a string").get<std::string>();
}

bool JsonFields::boolean(std::string_view name, std::optional<bool> absent) const {
  if (absent && find(name) == nullptr) return *absent;
  return typed(*this, name, &json::is_boolean, "true or false").get<bool>();
}

double JsonFields::number(std::string_view name, std::optional<double> absent) const {
  if (absent && find(name) == nullptr) return *absent;
  return typed(*this, name, &json::is_number, "a number").get<double>();
}

int64_t JsonFields::integer(std::string_view name, std::optional<int64_t> absent) const {
  if (absent && find(name) == nullptr) return *absent;
  const json& value = typed(*this, name, &json::is_number_integer, "an integer");
  const bool fits = !value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX};
  TWELL_REQUIRE(fits, "{}: \"{}\" must be an integer below 2^63, got {}", where_, name,
                show(value));
  return value.get<int64_t>();
}

uint64_t JsonFields::unsigned_integer(std::string_view name) const {
  return typed(*this, name, &json::is_number_unsigned, "an integer of 0 or more").get<uint64_t>();
}

void JsonFields::must_be_off(std::string_view name) const {
  const json* field = find(name);
  TWELL_REQUIRE(field == nullptr || asks_for_nothing(*field), "{}: \"{}\" is not supported", where_,
                name);
}

void JsonFields::finish(std::initializer_list<std::string_view> understood) const {
  for (const auto& [name, value] : value_.items()) {
    const bool known = std::find(understood.begin(), understood.end(), name) != understood.end();
    TWELL_REQUIRE(known || asks_for_nothing(value), "{}: the field {} is not supported", where_,
                  excerpt(name));
  }
}

}  // namespace twell
