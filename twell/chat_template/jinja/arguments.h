// SPDX-License-Identifier: Apache-2.0
// Arguments of filters, tests, methods and functions, matched with parameters as Python does.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twell/chat_template/jinja/value.h"

namespace twell::jinja {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// A parameter's value, or null when none was given.
using Matched = std::vector<const Value*>;

// parameters: names in order, each followed by ? when it may be left out; those in front of a / are
// given by position only, those behind a * by name only. InputError for an argument too many, one
// that is unknown or given twice, and one that is missing; `callee` names what was called.
Matched match(std::string_view callee, std::string_view parameters, const Arguments& arguments);

}  // namespace twell::jinja
