// SPDX-License-Identifier: Apache-2.0
// Checked access to the JSON of a file. Every failure is an InputError that names the object and
// the field.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace twell {

// The fields of an object. Null counts as absent. A typed function returns `absent` for an absent
// field; without it the field must be there.
class JsonFields {
 public:
  // where: the object's place, for messages, e.g. "config.json", "model" or "added_tokens[3]".
  JsonFields(const nlohmann::json& value, std::string where);

  const std::string& where() const { return where_; }
  const nlohmann::json& value() const { return value_; }

  // Returns nullptr when the field is absent.
  const nlohmann::json* find(std::string_view name) const;
  const nlohmann::json& array(std::string_view name) const;
  const nlohmann::json& object(std::string_view name) const;
  std::string text(std::string_view name, std::optional<std::string> absent = {}) const;
  bool boolean(std::string_view name, std::optional<bool> absent = {}) const;
  double number(std::string_view name, std::optional<double> absent = {}) const;
  int64_t integer(std::string_view name, std::optional<int64_t> absent = {}) const;
  uint64_t unsigned_integer(std::string_view name) const;

  // Refuses the field unless its value has no effect (null, false or empty).
  void must_be_off(std::string_view name) const;
  // Refuses every field that is not in `understood`, unless its value has no effect.
  void finish(std::initializer_list<std::string_view> understood) const;

 private:
  const nlohmann::json& value_;
  std::string where_;
};

// The JSON as text, on one line unless `indent` is given. Bytes of strings that are not UTF-8, as
// in the names of files, become U+FFFD.
std::string json_text(const nlohmann::json& value, int indent = -1);

// Formats a value, or a text as JSON, for a one-line message: ASCII, cut when long.
std::string show(const nlohmann::json& value);
std::string excerpt(std::string_view text);

}  // namespace twell
