// SPDX-License-Identifier: Apache-2.0
// The filters, tests, methods and functions that chat templates use. Internal to data.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "twell/chat_template/jinja_value.h"

namespace twell::jinja {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
  // The i-th, or the one of that name, or the fallback.
  Value get(size_t i, const std::string& name, Value fallback = Value::nothing()) const;
};

// InputError, without a position, on a name that is not supported or a value it is not for.
Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments);
Value call_method(const std::string& name, const Value& object, const Arguments& arguments);
Value call_function(const std::string& name, const Arguments& arguments);

}  // namespace twell::jinja
