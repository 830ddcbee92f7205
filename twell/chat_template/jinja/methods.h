// SPDX-License-Identifier: Apache-2.0
// Methods of Python's types.
#pragma once

#include <string_view>

#include "twell/chat_template/jinja/arguments.h"
#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

// Null when the type has no method of that name. A method that Python has and we lack is found too;
// its call is an InputError.
const MethodEntry* find_method(const Value& value, std::string_view name);
Value call_method(Budget& budget, const Method& method, const Arguments& arguments);

// Methods that change a list or a dictionary, which the sandbox forbids.
bool is_forbidden_method(const Value& value, std::string_view name);
// Names like __class__ that every object of Python has.
bool is_special_name(std::string_view name);

// Finds a method of texts (text_methods.cc).
const MethodEntry* find_text_method(std::string_view name);
// Whether the text is in the given case, as str.islower() and str.isupper() say.
bool is_lower_text(std::string_view text);
bool is_upper_text(std::string_view text);

}  // namespace twell::jinja
