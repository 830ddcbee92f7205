// SPDX-License-Identifier: Apache-2.0
// Values of chat templates: JSON, the undefined, and namespaces, with Python's ideas of truth, text
// and order. Internal to data.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <memory>
#include <string>

namespace twell::jinja {

using Json = nlohmann::ordered_json;

struct Value {
  Json data;  // null: None
  bool undefined = false;
  // namespace(): shared, so that an assignment inside a loop is seen outside.
  std::shared_ptr<std::map<std::string, Value>> space;

  Value() = default;
  Value(Json json) : data(std::move(json)) {}
  static Value nothing() {
    Value value;
    value.undefined = true;
    return value;
  }
  bool is_string() const { return data.is_string(); }
  const std::string& text() const { return data.get_ref<const std::string&>(); }
};

bool truthy(const Value& value);
bool equal(const Value& a, const Value& b);
// What {{ value }} writes: text as it is, the rest as Python's str().
std::string to_text(const Value& value);
// As Python's json.dumps(ensure_ascii=False); indent < 0: one line.
std::string to_json_text(const Json& value, int indent);

}  // namespace twell::jinja
