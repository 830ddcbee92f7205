// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/methods.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

[[noreturn]] Value lacking(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  throw InputError(fmt::format("this method of {} is not supported", shown(budget, self)));
}

// ---- dictionaries

Value dict_items(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  return budget.view(self, ViewKind::kItems);
}
Value dict_keys(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  return budget.view(self, ViewKind::kKeys);
}
Value dict_values(Budget& budget, const Value& self, const Arguments& /*arguments*/) {
  return budget.view(self, ViewKind::kValues);
}
Value dict_copy(Budget& /*budget*/, const Value& self, const Arguments& /*arguments*/) {
  return self;
}

Value dict_get(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("get", "key default? /", arguments);
  TWELL_REQUIRE(can_be_key(*given[0]), "{} cannot be a key", shown(budget, *given[0]));
  if (given[0]->text() != nullptr) budget.bytes(given[0]->text()->size());
  const Value* found = self.dict()->find(*given[0]);
  if (found != nullptr) return *found;
  return given[1] != nullptr ? *given[1] : Value::none();
}

constexpr MethodEntry kDictMethods[] = {
    {"copy", "", dict_copy},   {"fromkeys", "*", lacking}, {"get", "key default? /", dict_get},
    {"items", "", dict_items}, {"keys", "", dict_keys},    {"values", "", dict_values},
};

// ---- lists, tuples, ranges

Value sequence_count(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("count", "value /", arguments);
  int64_t count = 0;
  const auto items = iterate(budget, self);
  for (Value item; items->next(item);) count += equal(budget, item, *given[0]) ? 1 : 0;
  return Value::of(count);
}

Value sequence_index(Budget& budget, const Value& self, const Arguments& arguments) {
  const Matched given = match("index", "value start? stop? /", arguments);
  Integer size = 0;
  find_length(budget, self, size);
  const auto bound = [&](const Value* value, Integer fallback) {
    if (value == nullptr) return fallback;
    const Integer at = want_integer(budget, *value, "index");
    return at < 0 ? std::max<Integer>(at + size, 0) : at;
  };
  const Integer start = bound(given[1], 0), stop = bound(given[2], size);
  const auto items = iterate(budget, self);
  int64_t place = 0;
  for (Value item; items->next(item); ++place) {
    if (place >= start && place < stop && equal(budget, item, *given[0])) return Value::of(place);
  }
  throw InputError(fmt::format("{} is not in the list", shown(budget, *given[0])));
}

Value list_copy(Budget& /*budget*/, const Value& self, const Arguments& /*arguments*/) {
  return self;
}

constexpr MethodEntry kListMethods[] = {
    {"copy", "", list_copy},
    {"count", "value /", sequence_count},
    {"index", "value start? stop? /", sequence_index},
};

// ---- numbers

Value bit_length(Budget& /*budget*/, const Value& self, const Arguments& /*arguments*/) {
  Integer value = 0;
  find_integer(self, value);
  int64_t bits = 0;
  for (; value != 0; value /= 2) ++bits;
  return Value::of(bits);
}

Value real_is_integer(Budget& /*budget*/, const Value& self, const Arguments& /*arguments*/) {
  return Value::of(std::isfinite(*self.real()) && std::floor(*self.real()) == *self.real());
}

constexpr MethodEntry kIntegerMethods[] = {
    {"as_integer_ratio", "*", lacking}, {"bit_count", "*", lacking},
    {"bit_length", "", bit_length},     {"conjugate", "*", lacking},
    {"from_bytes", "*", lacking},       {"to_bytes", "*", lacking},
};
constexpr MethodEntry kRealMethods[] = {
    {"as_integer_ratio", "*", lacking},
    {"conjugate", "*", lacking},
    {"fromhex", "*", lacking},
    {"hex", "*", lacking},
    {"imag", "*", lacking},
    {"is_integer", "", real_is_integer},
    {"real", "*", lacking},
};

const MethodEntry* find_in(std::span<const MethodEntry> table, std::string_view name) {
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const auto& e) { return e.name == name; });
  return found == table.end() ? nullptr : &*found;
}

}  // namespace

const MethodEntry* find_method(const Value& value, std::string_view name) {
  if (value.text() != nullptr) return find_text_method(name);
  if (value.dict() != nullptr) return find_in(kDictMethods, name);
  if (value.list() != nullptr || value.range() != nullptr) {
    const MethodEntry* found = find_in(kListMethods, name);
    const bool copied = value.list() != nullptr && value.list()->kind == ListKind::kList;
    return found != nullptr && found->name == "copy" && !copied ? nullptr : found;
  }
  if (value.integer() != nullptr || value.boolean() != nullptr) {
    return find_in(kIntegerMethods, name);
  }
  return value.real() != nullptr ? find_in(kRealMethods, name) : nullptr;
}

Value call_method(Budget& budget, const Method& method, const Arguments& arguments) {
  const MethodEntry& entry = *method.entry;
  budget.step();
  if (entry.parameters.empty()) match(entry.name, "", arguments);
  TWELL_REQUIRE(entry.call != lacking, "the method '{}' of {} is not supported", entry.name,
                type_name(method.self));
  return entry.call(budget, method.self, arguments);
}

bool is_forbidden_method(const Value& value, std::string_view name) {
  constexpr std::string_view kOfLists[] = {"append", "clear",  "extend",  "insert",
                                           "pop",    "remove", "reverse", "sort"};
  constexpr std::string_view kOfDicts[] = {"clear", "pop", "popitem", "setdefault", "update"};
  if (value.dict() != nullptr) {
    return std::find(std::begin(kOfDicts), std::end(kOfDicts), name) != std::end(kOfDicts);
  }
  return value.list() != nullptr && !value.is_tuple() &&
         std::find(std::begin(kOfLists), std::end(kOfLists), name) != std::end(kOfLists);
}

bool is_special_name(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "__class__",  "__delattr__",   "__dir__",         "__doc__",
      "__eq__",     "__format__",    "__ge__",          "__getattribute__",
      "__gt__",     "__hash__",      "__init__",        "__init_subclass__",
      "__le__",     "__lt__",        "__ne__",          "__new__",
      "__reduce__", "__reduce_ex__", "__repr__",        "__setattr__",
      "__sizeof__", "__str__",       "__subclasshook__"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace twell::jinja
