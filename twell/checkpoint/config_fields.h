// SPDX-License-Identifier: Apache-2.0
// Typed access to the keys of one JSON object; null counts as absent, as it does in transformers.
// Every error names the source and the key. Internal to model.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

#include "twell/base/error.h"

namespace twell {

class Fields {
 public:
  using json = nlohmann::json;

  Fields(const json& object, const std::string& source) : object_(object), source_(source) {}

  const std::string& source() const { return source_; }
  const json& object() const { return object_; }
  bool given(const char* key) const { return object_.contains(key); }  // null too
  const json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(const char* key) const {
    TWELL_REQUIRE(find(key) != nullptr, "{}: {} is missing", source_, key);
    return integer(key, 0);
  }
  int64_t integer(const char* key, int64_t fallback) const {
    const json* value = find(key);
    return value == nullptr ? fallback : to_integer(key, *value);
  }
  double number(const char* key, double fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    TWELL_REQUIRE(value->is_number(), "{}: {} must be a number, got {}", source_, key,
                  show(*value));
    return value->get<double>();
  }
  bool boolean(const char* key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    TWELL_REQUIRE(value->is_boolean(), "{}: {} must be true or false, got {}", source_, key,
                  show(*value));
    return value->get<bool>();
  }
  std::string text(const char* key, const char* fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    TWELL_REQUIRE(value->is_string(), "{}: {} must be a string, got {}", source_, key,
                  show(*value));
    return value->get<std::string>();
  }
  int64_t to_integer(const char* key, const json& value) const {
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
    TWELL_REQUIRE(fits, "{}: {} must be an integer, got {}", source_, key, show(value));
    return value.get<int64_t>();
  }
  static std::string show(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > 60) text.replace(57, std::string::npos, "...");
    return text;
  }

 private:
  const json& object_;
  const std::string& source_;
};

}  // namespace twell
