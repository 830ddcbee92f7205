// SPDX-License-Identifier: Apache-2.0
// Arithmetic, reading and writing of numbers as Python does it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "twell/chat_template/jinja/value.h"

namespace twell::jinja {

// sign: "+", "-", "*", "/", "//", "%" or "**"; both values are numbers (a boolean is 0 or 1).
Value calculated(std::string_view sign, const Value& a, const Value& b);
double as_real(const Value& number);

// repr() of a float.
std::string real_text(double value);
std::string integer_text(Integer value);

// int(text, base) and float(text) of a text without blanks around it; empty where Python raises
// ValueError. InputError when the number is too large for us.
std::optional<Integer> parse_integer(std::string_view text, int base);
std::optional<double> parse_real(std::string_view text);

// int() of a float: towards zero. InputError for nan and infinity.
Integer truncated(double value);
// round(value, digits): halves of the exact value go to the even digit.
double rounded(double value, int64_t digits);

}  // namespace twell::jinja
