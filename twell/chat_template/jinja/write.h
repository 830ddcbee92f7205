// SPDX-License-Identifier: Apache-2.0
// Values as text: Python's str() and repr(), and JSON.
#pragma once

#include <string>
#include <string_view>

#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

// Appends what {{ value }} prints.
void append_str(Budget& budget, const Value& value, std::string& out);
std::string to_text(Budget& budget, const Value& value);
// str(value) as a value; a text that is one already is not copied.
Value soft_text(Budget& budget, const Value& value);

void append_repr(Budget& budget, const Value& value, std::string& out);
void append_quoted(Budget& budget, std::string_view text, std::string& out);  // repr() of a text
std::string ascii_repr(Budget& budget, const Value& value);                   // ascii()

// The beginning of the value's repr() on one line, for messages.
std::string shown(Budget& budget, const Value& value);
// Its type's name in Python.
const char* type_name(const Value& value);

// json.dumps(). Without an indent all is on one line.
struct JsonStyle {
  bool ascii = false;
  bool sorted = false;
  bool indented = false;
  std::string indent;  // of a level
  std::string between = ", ";
  std::string after_key = ": ";
};
std::string to_json(Budget& budget, const Value& value, const JsonStyle& style);

}  // namespace twell::jinja
