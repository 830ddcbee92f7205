// SPDX-License-Identifier: Apache-2.0
// What Python's operators do with values. InputError where Python raises an exception.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

bool truthy(const Value& value);
bool equal(Budget& budget, const Value& a, const Value& b);
// sign: "<", "<=", ">" or ">=".
bool ordered(Budget& budget, std::string_view sign, const Value& a, const Value& b);
bool less(Budget& budget, const Value& a, const Value& b);
bool contains(Budget& budget, const Value& item, const Value& container);

// sign: "+", "-", "*", "/", "//", "%" or "**".
Value arithmetic(Budget& budget, std::string_view sign, const Value& a, const Value& b);
Value negated(Budget& budget, const Value& value);
Value positive(Budget& budget, const Value& value);

// Python's iter(): the items of a list, the keys of a dictionary, the characters of a text. The
// iterator keeps what it iterates over alive. Null when the value cannot be iterated over.
std::unique_ptr<Iterator> try_iterate(Budget& budget, const Value& value);
std::unique_ptr<Iterator> iterate(Budget& budget, const Value& value);
// Iterates over values that are no list of a template.
std::unique_ptr<Iterator> iterate_list(std::vector<Value> items);
// Iterates backwards as try_iterate() does forwards; null where reversed() of Python fails.
std::unique_ptr<Iterator> try_iterate_back(Budget& budget, const Value& value);
std::vector<Value> items_of(Budget& budget, const Value& value);
// Python's len(); false where it fails.
bool find_length(Budget& budget, const Value& value, Integer& length);

// Finds the integer of a number's operand; a boolean counts as 0 or 1.
bool find_integer(const Value& value, Integer& found);
// The error of an operation that an undefined value does not have.
void require_defined(const Value& value);

// Whole numbers with a bound, for what counts things. `what` names the argument in the error.
Integer want_integer(Budget& budget, const Value& value, std::string_view what);
int64_t want_count(Budget& budget, const Value& value, std::string_view what);
const std::string& want_text(Budget& budget, const Value& value, std::string_view what);

}  // namespace twell::jinja
