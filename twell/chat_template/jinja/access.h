// SPDX-License-Identifier: Apache-2.0
// Attributes, items and slices of values, as the sandbox of jinja2 gives them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

// value.name: a method or property of the value, else the item of that name. Undefined when there
// is neither.
Value get_attribute(Budget& budget, const Value& value, std::string_view name);
// A method or property of the value's type, never an item; false when there is none of that name.
bool find_own(Budget& budget, const Value& value, std::string_view name, Value& found);
// value[key]: the item, else, for a text, the method or property of that name.
Value get_item(Budget& budget, const Value& value, const Value& key);
// value[from:to:step]
Value get_slice(Budget& budget, const Value& value, const Value& from, const Value& to,
                const Value& step);

// A path like "function.name" or "0.role", or an index; None stands for the value itself.
class AttributePath {
 public:
  AttributePath(Budget& budget, const Value& path);
  // fallback: instead of what is undefined on the way; null: none.
  Value get(Budget& budget, Value value, const Value* fallback = nullptr) const;

 private:
  std::vector<Value> parts_;
};

}  // namespace twell::jinja
