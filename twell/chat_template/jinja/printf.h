// SPDX-License-Identifier: Apache-2.0
// Python's two ways to format texts: the operator % and str.format().
#pragma once

#include <string>

#include "twell/chat_template/jinja/arguments.h"
#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

// text % values
Value printf_text(Budget& budget, const Value& format, const Value& values);
// format.format(*positional, **named); InputError for what our part of the language lacks.
Value format_text(Budget& budget, const Value& format, const Arguments& arguments);
// format(value, spec)
std::string format_value(Budget& budget, const Value& value, std::string_view spec);

}  // namespace twell::jinja
