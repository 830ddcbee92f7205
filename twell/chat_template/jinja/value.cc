// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/value.h"

#include <algorithm>
#include <cmath>

namespace twell::jinja {
namespace {

constexpr size_t kFew = 8;  // items of a dictionary that are searched one by one

// What kind of key a value is; keys of different kinds are unequal.
int key_kind(const Value& value) {
  if (value.is_number()) return 0;
  return 1 + static_cast<int>(value.data().index());
}

template <typename T>
int compare(const T& a, const T& b) {
  return a < b ? -1 : b < a ? 1 : 0;
}

const void* identity(const Value& value) {
  if (value.object() != nullptr) return value.object();
  if (value.function() != nullptr) return value.function();
  if (value.generator() != nullptr) return value.generator();
  return value.range();
}

int compare_integer_with_real(Integer a, double b) {
  if (std::isnan(b)) return 2;
  if (b >= 0x1p126) return -1;
  if (b <= -0x1p126) return 1;
  const double whole = std::floor(b);
  const auto below = static_cast<Integer>(whole);
  if (a != below) return a < below ? -1 : 1;
  return whole < b ? -1 : 0;
}

Integer as_integer(const Value& value) {
  return value.boolean() != nullptr ? Integer{*value.boolean()} : *value.integer();
}

}  // namespace

Value Value::of(std::string text, bool markup) {
  return Value(Data(std::make_shared<const Text>(Text{std::move(text), markup})));
}

const std::string* Value::text() const {
  const auto* found = pointer<const Text>();
  return found == nullptr ? nullptr : &found->bytes;
}

bool Value::is_markup() const {
  const auto* found = pointer<const Text>();
  return found != nullptr && found->markup;
}

bool Value::is_tuple() const { return list() != nullptr && list()->kind != ListKind::kList; }

int Value::depth() const {
  if (list() != nullptr) return list()->depth;
  if (dict() != nullptr) return dict()->depth;
  if (view() != nullptr) return view()->dict->depth + 1;
  if (generator() != nullptr) return generator()->depth;
  if (method() != nullptr) return method()->self.depth() + 1;
  return 0;
}

Integer Range::count() const {
  if (step > 0 ? start >= stop : start <= stop) return 0;
  return step > 0 ? (stop - start - 1) / step + 1 : (start - stop - 1) / -step + 1;
}

bool can_be_key(const Value& value) {
  if (value.dict() != nullptr || value.view() != nullptr || value.method() != nullptr) return false;
  const List* list = value.list();
  return list == nullptr || (list->kind != ListKind::kList &&
                             std::all_of(list->items.begin(), list->items.end(), can_be_key));
}

int compare_numbers(const Value& a, const Value& b) {
  if (a.real() == nullptr && b.real() == nullptr) return compare(as_integer(a), as_integer(b));
  if (a.real() == nullptr) return compare_integer_with_real(as_integer(a), *b.real());
  if (b.real() == nullptr) {
    const int order = compare_integer_with_real(as_integer(b), *a.real());
    return order == 2 ? 2 : -order;
  }
  if (std::isnan(*a.real()) || std::isnan(*b.real())) return 2;
  return compare(*a.real(), *b.real());
}

int compare_keys(const Value& a, const Value& b) {
  const int kind = compare(key_kind(a), key_kind(b));
  if (kind != 0) return kind;
  if (a.is_number()) {
    const int order = compare_numbers(a, b);
    if (order != 2) return order;
    const auto is_nan = [](const Value& v) { return v.real() != nullptr && std::isnan(*v.real()); };
    return compare(is_nan(a), is_nan(b));
  }
  if (a.text() != nullptr) return a.text()->compare(*b.text());
  if (a.list() != nullptr) {
    const std::vector<Value>& x = a.list()->items;
    const std::vector<Value>& y = b.list()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      const int order = compare_keys(x[i], y[i]);
      if (order != 0) return order;
    }
    return compare(x.size(), y.size());
  }
  return compare(identity(a), identity(b));
}

const Value* Dict::find(const Value& key) const {
  if (sorted.empty()) {
    if (key.text() != nullptr) return find(std::string_view(*key.text()));
    for (const auto& [name, value] : items) {
      if (compare_keys(name, key) == 0) return &value;
    }
    return nullptr;
  }
  const auto at = std::lower_bound(
      sorted.begin(), sorted.end(), key,
      [this](uint32_t i, const Value& other) { return compare_keys(items[i].first, other) < 0; });
  return at != sorted.end() && compare_keys(items[*at].first, key) == 0 ? &items[*at].second
                                                                        : nullptr;
}

const Value* Dict::find(std::string_view key) const {
  if (!sorted.empty()) return find(Value::of(std::string(key)));
  for (const auto& [name, value] : items) {
    if (name.text() != nullptr && *name.text() == key) return &value;
  }
  return nullptr;
}

size_t DictBuilder::find(const Value& key) const {
  if (!places_.empty()) {
    const auto found = places_.find(key);
    return found == places_.end() ? kNowhere : found->second;
  }
  for (size_t i = 0; i < items_.size(); ++i) {
    if (compare_keys(items_[i].first, key) == 0) return i;
  }
  return kNowhere;
}

void DictBuilder::add(Value key, Value value) {
  const size_t at = find(key);
  if (at != kNowhere) {
    items_[at].second = std::move(value);
    return;
  }
  items_.emplace_back(std::move(key), std::move(value));
  if (items_.size() <= kFew) return;
  for (size_t i = places_.size(); i < items_.size(); ++i) {
    places_.emplace(items_[i].first, static_cast<uint32_t>(i));
  }
}

Value DictBuilder::finish() {
  auto dict = std::make_shared<Dict>();
  dict->sorted.reserve(places_.size());
  for (const auto& [key, place] : places_) dict->sorted.push_back(place);
  for (const auto& [key, value] : items_) {
    dict->depth = std::max({dict->depth, key.depth() + 1, value.depth() + 1});
  }
  dict->items = std::move(items_);
  return Value(Value::Data(std::shared_ptr<const Dict>(std::move(dict))));
}

}  // namespace twell::jinja
