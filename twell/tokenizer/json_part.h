// SPDX-License-Identifier: Apache-2.0
// Checked access to the JSON of a file. Every failure is an InputError that names the part.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace twell {

// An object of the file. finish() refuses every field that is not in `understood`, unless its
// value is null, false or empty and so has no effect.
class JsonPart {
 public:
  // where: the object's place in the file, for messages, e.g. "model" or "added_tokens[3]".
  JsonPart(const nlohmann::json& value, std::string where);

  const std::string& where() const { return where_; }
  // Returns nullptr when the field is missing or null.
  const nlohmann::json* find(std::string_view name) const;
  const nlohmann::json& array(std::string_view name) const;
  const nlohmann::json& object(std::string_view name) const;
  std::string string(std::string_view name) const;
  std::string string_or_empty(std::string_view name) const;
  bool boolean(std::string_view name, bool missing) const;
  int32_t id(std::string_view name) const;

  // Refuses the field unless its value has no effect (null, false or empty).
  void must_be_off(std::string_view name) const;
  void finish(std::initializer_list<std::string_view> understood) const;

 private:
  const nlohmann::json& required(std::string_view name) const;
  const nlohmann::json& value_;
  std::string where_;
};

// Reads an id: a non-negative integer below 2^31 - 1.
int32_t json_to_id(const nlohmann::json& value, const std::string& where);

// Formats a text of the file for a one-line message: JSON-quoted, ASCII, cut when long.
std::string excerpt(std::string_view text);

}  // namespace twell
