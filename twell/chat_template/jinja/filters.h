// SPDX-License-Identifier: Apache-2.0
// Filters ({{ value | filter(arguments) }}) and tests (value is test(arguments)) of jinja2, with
// tojson as transformers defines it.
#pragma once

#include <string_view>

#include "twell/chat_template/jinja/arguments.h"
#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

Value apply_filter(Budget& budget, std::string_view name, const Value& value,
                   const Arguments& arguments);
bool apply_test(Budget& budget, std::string_view name, const Value& value,
                const Arguments& arguments);

// Whether jinja2 has a filter or test of that name; some of its filters are not supported here.
bool is_filter(std::string_view name);
bool is_test(std::string_view name);

// What a filter is applied to and its arguments, matched with the parameters of its entry.
struct FilterCall {
  Budget& budget;
  const Value& value;
  const Arguments& arguments;
  Matched given;

  // Whether the argument was given and is not None.
  bool has(size_t i) const { return given[i] != nullptr && !given[i]->is_none(); }
  bool flag(size_t i) const;
  Value get(size_t i, Value fallback) const { return given[i] != nullptr ? *given[i] : fallback; }
};
struct FilterEntry {
  std::string_view name;
  std::string_view parameters;  // see match(); "..." when the filter looks at them itself
  Value (*apply)(const FilterCall& call);
};
// Null when it is not one of theirs. Those of sequences are in sequence_filters.cc.
const FilterEntry* find_value_filter(std::string_view name);
const FilterEntry* find_sequence_filter(std::string_view name);

}  // namespace twell::jinja
