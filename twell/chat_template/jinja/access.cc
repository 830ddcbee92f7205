// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/access.h"

#include <algorithm>

#include "twell/chat_template/jinja/methods.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

Value forbidden() { return Value(Value::Data(Undefined{nullptr, true})); }

// Position of an index; false when it is out of range.
bool find_place(Integer index, Integer size, Integer& place) {
  place = index < 0 ? index + size : index;
  return place >= 0 && place < size;
}

// value[key] of Python; false where it raises TypeError or LookupError.
bool find_item(Budget& budget, const Value& value, const Value& key, Value& found) {
  if (const Dict* dict = value.dict()) {
    if (!can_be_key(key)) return false;
    if (key.text() != nullptr) budget.bytes(key.text()->size());
    const Value* item = dict->find(key);
    if (item != nullptr) found = *item;
    return item != nullptr;
  }
  Integer index = 0, place = 0;
  if (!find_integer(key, index)) return false;
  if (const List* list = value.list()) {
    if (!find_place(index, std::ssize(list->items), place)) return false;
    found = list->items[static_cast<size_t>(place)];
    return true;
  }
  if (const Range* range = value.range()) {
    if (!find_place(index, range->count(), place)) return false;
    found = Value::of(range->start + place * range->step);
    return true;
  }
  if (const std::string* text = value.text()) {
    // Walks from the nearer known end, because most indices are 0 or -1.
    if (index >= std::ssize(*text) || index < -std::ssize(*text)) return false;
    size_t at = index >= 0 ? 0 : text->size();
    size_t steps = static_cast<size_t>(index >= 0 ? index : -index);
    budget.bytes(steps + 1);
    for (; steps > 0; --steps) {
      if (at == (index >= 0 ? text->size() : 0)) return false;
      index >= 0 ? next_code_point(*text, at) : previous_code_point(*text, at);
    }
    if (at == text->size()) return false;
    const size_t begin = at;
    next_code_point(*text, at);
    found = budget.text(text->substr(begin, at - begin), value.is_markup());
    return true;
  }
  return false;
}

Value slice_of_list(Budget& budget, const List& list, const Range& places) {
  std::vector<Value> items;
  Integer at = places.start;
  const auto count = static_cast<size_t>(places.count());
  budget.bytes(count * sizeof(Value));
  items.reserve(count);
  for (size_t i = 0; i < count; ++i, at += places.step) {
    items.push_back(list.items[static_cast<size_t>(at)]);
  }
  return budget.list(std::move(items),
                     list.kind == ListKind::kGroup ? ListKind::kTuple : list.kind);
}

Value slice_of_text(Budget& budget, const Value& text, const Range& places) {
  const std::string& bytes = *text.text();
  const std::vector<uint32_t> begins = offsets(budget, bytes);
  const auto count = static_cast<size_t>(places.count());
  std::string out;
  if (count > 0 && places.step == 1) {
    const uint32_t begin = begins[static_cast<size_t>(places.start)];
    const uint32_t end = begins[static_cast<size_t>(places.start) + count];
    return budget.text(bytes.substr(begin, end - begin), text.is_markup());
  }
  Integer at = places.start;
  for (size_t i = 0; i < count; ++i, at += places.step) {
    const auto place = static_cast<size_t>(at);
    out.append(bytes, begins[place], begins[place + 1] - begins[place]);
  }
  return budget.text(std::move(out), text.is_markup());
}

}  // namespace

bool find_own(Budget& budget, const Value& value, std::string_view name, Value& found) {
  if (value.object() != nullptr) return value.object()->find(budget, std::string(name), found);
  if (name.starts_with("__") && name.ends_with("__") && name.size() > 4) {
    if (!is_special_name(name)) return false;
    found = forbidden();
    return true;
  }
  if (const List* list = value.list(); list != nullptr && list->kind == ListKind::kGroup) {
    if (name == "grouper" || name == "list") {
      found = list->items[name == "list" ? 1 : 0];
      return true;
    }
  }
  if (const Range* range = value.range()) {
    const Integer* field = name == "start"  ? &range->start
                           : name == "stop" ? &range->stop
                           : name == "step" ? &range->step
                                            : nullptr;
    if (field != nullptr) return found = Value::of(*field), true;
  }
  if (Integer whole = 0; find_integer(value, whole)) {
    if (name == "real" || name == "numerator") return found = Value::of(whole), true;
    if (name == "imag" || name == "denominator") {
      return found = Value::of(Integer{name == "imag" ? 0 : 1}), true;
    }
  }
  if (is_forbidden_method(value, name)) return found = forbidden(), true;
  const MethodEntry* entry = find_method(value, name);
  if (entry == nullptr) return false;
  budget.bytes(sizeof(Method) + sizeof(Value));
  TWELL_REQUIRE(value.depth() < kMaxDepth, "a value is nested more than {} deep", kMaxDepth);
  found = Value(
      Value::Data(std::shared_ptr<const Method>(std::make_shared<Method>(Method{value, entry}))));
  return true;
}

Value get_attribute(Budget& budget, const Value& value, std::string_view name) {
  require_defined(value);
  Value found;
  if (find_own(budget, value, name, found)) return found;
  if (const Dict* dict = value.dict()) {
    budget.bytes(name.size());
    const Value* item = dict->find(name);
    if (item != nullptr) return *item;
  }
  return {};
}

Value get_item(Budget& budget, const Value& value, const Value& key) {
  require_defined(value);
  Value found;
  if (find_item(budget, value, key, found)) return found;
  if (key.text() != nullptr && find_own(budget, value, *key.text(), found)) return found;
  return {};
}

Value get_slice(Budget& budget, const Value& value, const Value& from, const Value& to,
                const Value& step) {
  require_defined(value);
  Integer size = 0;
  const bool fits = value.list() != nullptr || value.text() != nullptr || value.range() != nullptr;
  TWELL_REQUIRE(fits && find_length(budget, value, size), "{} cannot be sliced",
                shown(budget, value));
  const auto bound = [&](const Value& given, Integer fallback) {
    return given.is_none() ? fallback : want_integer(budget, given, "a slice");
  };
  const Integer stride = bound(step, 1);
  TWELL_REQUIRE(stride != 0, "a slice needs a step other than 0");
  const auto place = [&](const Value& given, Integer fallback) {
    if (given.is_none()) return fallback;
    const Integer at = bound(given, 0);
    return std::clamp<Integer>(at < 0 ? at + size : at, stride > 0 ? 0 : -1,
                               stride > 0 ? size : size - 1);
  };
  const Range places{place(from, stride > 0 ? Integer{0} : size - 1),
                     place(to, stride > 0 ? size : Integer{-1}), stride};
  if (const Range* range = value.range()) {
    const Range cut{range->start + places.start * range->step,
                    range->start + places.stop * range->step, range->step * stride};
    return Value(Value::Data(std::make_shared<const Range>(cut)));
  }
  return value.text() != nullptr ? slice_of_text(budget, value, places)
                                 : slice_of_list(budget, *value.list(), places);
}

AttributePath::AttributePath(Budget& budget, const Value& path) {
  const std::string* text = path.text();
  if (text == nullptr) {
    if (!path.is_none()) parts_.push_back(path);
    return;
  }
  for (const std::string_view part : split(budget, *text, ".", -1)) {
    const bool digits =
        !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    const auto number = digits ? parse_integer(part, 10) : std::nullopt;
    budget.bytes(sizeof(Value));
    parts_.push_back(number ? Value::of(*number) : budget.text(std::string(part)));
  }
}

Value AttributePath::get(Budget& budget, Value value, const Value* fallback) const {
  for (const Value& part : parts_) {
    value = get_item(budget, value, part);
    if (value.is_undefined() && fallback != nullptr && !fallback->is_none()) value = *fallback;
  }
  return value;
}

}  // namespace twell::jinja
