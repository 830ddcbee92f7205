// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/printf.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

// ---- comparison

bool equal_lists(Budget& budget, const List& a, const List& b) {
  if ((a.kind == ListKind::kList) != (b.kind == ListKind::kList)) return false;
  return std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(),
                    [&](const Value& x, const Value& y) { return equal(budget, x, y); });
}

bool equal_dicts(Budget& budget, const Dict& a, const Dict& b) {
  if (a.items.size() != b.items.size()) return false;
  return std::all_of(a.items.begin(), a.items.end(), [&](const auto& item) {
    const Value* other = b.find(item.first);
    return other != nullptr && equal(budget, item.second, *other);
  });
}

// Views of keys and of items are sets; those of values are equal to themselves only.
bool equal_views(Budget& budget, const View& a, const View& b) {
  if (a.kind != b.kind || a.kind == ViewKind::kValues) return &a == &b;
  if (a.kind == ViewKind::kItems) return equal_dicts(budget, *a.dict, *b.dict);
  budget.steps(a.dict->items.size());
  return a.dict->items.size() == b.dict->items.size() &&
         std::all_of(a.dict->items.begin(), a.dict->items.end(),
                     [&](const auto& item) { return b.dict->find(item.first) != nullptr; });
}

bool equal_ranges(const Range& a, const Range& b) {
  const Integer count = a.count();
  return count == b.count() &&
         (count == 0 || (a.start == b.start && (count == 1 || a.step == b.step)));
}

bool holds(std::string_view sign, int order) {
  if (order == 2) return false;  // nan
  if (sign == "<") return order < 0;
  if (sign == ">") return order > 0;
  return sign == "<=" ? order <= 0 : order >= 0;
}

[[noreturn]] void refuse(Budget& budget, const Value& a, std::string_view sign, const Value& b) {
  throw InputError(
      fmt::format("{} {} {} makes no sense", shown(budget, a), sign, shown(budget, b)));
}

// ---- repetition and concatenation

Value repeated_text(Budget& budget, const Value& text, Integer count) {
  const std::string& part = *text.text();
  if (count <= 0 || part.empty()) return budget.text("", text.is_markup());
  TWELL_REQUIRE(count <= static_cast<Integer>(kMaxBytes / part.size()),
                "a text repeated {} times is too long", count);
  budget.bytes(part.size() * static_cast<size_t>(count));
  std::string out;
  out.reserve(part.size() * static_cast<size_t>(count));
  for (Integer i = 0; i < count; ++i) out += part;
  return Value::of(std::move(out), text.is_markup());
}

Value repeated_list(Budget& budget, const List& list, Integer count) {
  std::vector<Value> out;
  if (count > 0 && !list.items.empty()) {
    TWELL_REQUIRE(count <= static_cast<Integer>(kMaxBytes / sizeof(Value) / list.items.size()),
                  "a list repeated {} times is too long", count);
    budget.bytes(list.items.size() * static_cast<size_t>(count) * sizeof(Value));
    for (Integer i = 0; i < count; ++i) out.insert(out.end(), list.items.begin(), list.items.end());
  }
  return budget.list(std::move(out), list.kind == ListKind::kGroup ? ListKind::kTuple : list.kind);
}

Value joined_texts(Budget& budget, const Value& a, const Value& b) {
  const bool markup = a.is_markup() || b.is_markup();
  const auto part = [&](const Value& side) {
    return markup && !side.is_markup() ? html_escaped(budget, *side.text()) : *side.text();
  };
  budget.bytes(a.text()->size() + b.text()->size());
  return budget.text(part(a) + part(b), markup);
}

// ---- iteration

class ListItems : public Iterator {
 public:
  ListItems(Value list, bool back)
      : list_(std::move(list)), back_(back), at_(back ? list_.list()->items.size() : 0) {}
  bool next(Value& item) override {
    const std::vector<Value>& items = list_.list()->items;
    if (back_ ? at_ == 0 : at_ == items.size()) return false;
    item = back_ ? items[--at_] : items[at_++];
    return true;
  }

 private:
  Value list_;
  bool back_;
  size_t at_;
};

class DictItems : public Iterator {
 public:
  DictItems(Budget& budget, std::shared_ptr<const Dict> dict, ViewKind kind, bool back)
      : budget_(budget),
        dict_(std::move(dict)),
        kind_(kind),
        back_(back),
        at_(back ? dict_->items.size() : 0) {}
  bool next(Value& item) override {
    if (back_ ? at_ == 0 : at_ == dict_->items.size()) return false;
    const auto& [key, value] = dict_->items[back_ ? --at_ : at_++];
    if (kind_ == ViewKind::kItems) {
      item = budget_.list({key, value}, ListKind::kTuple);
    } else {
      item = kind_ == ViewKind::kKeys ? key : value;
    }
    return true;
  }

 private:
  Budget& budget_;
  std::shared_ptr<const Dict> dict_;
  ViewKind kind_;
  bool back_;
  size_t at_;
};

class Characters : public Iterator {
 public:
  Characters(Budget& budget, Value text) : budget_(budget), text_(std::move(text)) {}
  bool next(Value& item) override {
    const std::string& text = *text_.text();
    if (at_ >= text.size()) return false;
    const size_t begin = at_;
    next_code_point(text, at_);
    item = budget_.text(text.substr(begin, at_ - begin));
    return true;
  }

 private:
  Budget& budget_;
  Value text_;
  size_t at_ = 0;
};

class RangeItems : public Iterator {
 public:
  RangeItems(const Range& range, bool back)
      : next_(back ? range.start + (range.count() - 1) * range.step : range.start),
        step_(back ? -range.step : range.step),
        left_(range.count()) {}
  bool next(Value& item) override {
    if (left_-- <= 0) return false;
    item = Value::of(next_);
    next_ += step_;
    return true;
  }

 private:
  Integer next_, step_, left_;
};

class Rest : public Iterator {
 public:
  explicit Rest(Value generator) : generator_(std::move(generator)) {}
  bool next(Value& item) override { return generator_.generator()->items->next(item); }

 private:
  Value generator_;
};

class OwnItems : public Iterator {
 public:
  explicit OwnItems(std::vector<Value> items) : items_(std::move(items)) {}
  bool next(Value& item) override {
    if (at_ == items_.size()) return false;
    item = items_[at_++];
    return true;
  }

 private:
  std::vector<Value> items_;
  size_t at_ = 0;
};

class Nothing : public Iterator {
 public:
  bool next(Value& /*item*/) override { return false; }
};

}  // namespace

void require_defined(const Value& value) {
  const Undefined* missing = value.missing();
  if (missing == nullptr) return;
  const std::string name = missing->name == nullptr ? "a value" : "'" + *missing->name + "'";
  TWELL_REQUIRE(!missing->forbidden,
                "{} would change a value or reach into the program, which templates may not", name);
  throw InputError(name + " is undefined");
}

bool truthy(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (const bool* boolean = value.boolean()) return *boolean;
  if (const Integer* integer = value.integer()) return *integer != 0;
  if (const double* real = value.real()) return *real != 0.0;
  if (const std::string* text = value.text()) return !text->empty();
  if (const List* list = value.list()) return !list->items.empty();
  if (const Dict* dict = value.dict()) return !dict->items.empty();
  if (const View* view = value.view()) return !view->dict->items.empty();
  if (const Range* range = value.range()) return range->count() != 0;
  return true;
}

bool equal(Budget& budget, const Value& a, const Value& b) {
  budget.step();
  if (a.is_number()) return b.is_number() && compare_numbers(a, b) == 0;
  if (a.data().index() != b.data().index()) return false;
  if (a.is_undefined() || a.is_none()) return true;
  if (const std::string* text = a.text()) {
    budget.bytes(std::min(text->size(), b.text()->size()));
    return *text == *b.text();
  }
  if (a.list() != nullptr) return equal_lists(budget, *a.list(), *b.list());
  if (a.dict() != nullptr) return equal_dicts(budget, *a.dict(), *b.dict());
  if (a.view() != nullptr) return equal_views(budget, *a.view(), *b.view());
  if (a.range() != nullptr) return equal_ranges(*a.range(), *b.range());
  if (a.method() != nullptr) {
    return a.method()->entry == b.method()->entry &&
           equal(budget, a.method()->self, b.method()->self);
  }
  return a.object() == b.object() && a.function() == b.function() && a.generator() == b.generator();
}

bool ordered(Budget& budget, std::string_view sign, const Value& a, const Value& b) {
  budget.step();
  require_defined(a);
  require_defined(b);
  if (a.is_number() && b.is_number()) return holds(sign, compare_numbers(a, b));
  if (a.text() != nullptr && b.text() != nullptr) {
    budget.bytes(std::min(a.text()->size(), b.text()->size()));
    return holds(sign, a.text()->compare(*b.text()));
  }
  if (a.list() != nullptr && b.list() != nullptr && a.is_tuple() == b.is_tuple()) {
    const std::vector<Value>& x = a.list()->items;
    const std::vector<Value>& y = b.list()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(budget, x[i], y[i])) return ordered(budget, sign, x[i], y[i]);
    }
    return holds(sign, x.size() < y.size() ? -1 : x.size() > y.size() ? 1 : 0);
  }
  refuse(budget, a, sign, b);
}

bool less(Budget& budget, const Value& a, const Value& b) { return ordered(budget, "<", a, b); }

bool contains(Budget& budget, const Value& item, const Value& container) {
  if (const std::string* text = container.text()) {
    if (item.text() == nullptr) refuse(budget, item, "in", container);
    return find_text(budget, *text, *item.text()) != std::string::npos;
  }
  const View* view = container.view();
  if (container.dict() != nullptr || (view != nullptr && view->kind == ViewKind::kKeys)) {
    TWELL_REQUIRE(can_be_key(item), "{} cannot be a key", shown(budget, item));
    budget.step();
    return (view != nullptr ? *view->dict : *container.dict()).find(item) != nullptr;
  }
  const auto items = try_iterate(budget, container);
  if (items == nullptr) refuse(budget, item, "in", container);
  for (Value other; items->next(other);) {
    if (equal(budget, item, other)) return true;
  }
  return false;
}

Value arithmetic(Budget& budget, std::string_view sign, const Value& a, const Value& b) {
  budget.step();
  require_defined(a);
  if (sign == "%" && a.text() != nullptr) return printf_text(budget, a, b);
  require_defined(b);
  if (a.is_number() && b.is_number()) return calculated(sign, a, b);
  if (sign == "+") {
    if (a.text() != nullptr && b.text() != nullptr) return joined_texts(budget, a, b);
    if (a.list() != nullptr && b.list() != nullptr && a.is_tuple() == b.is_tuple()) {
      std::vector<Value> out;
      budget.bytes((a.list()->items.size() + b.list()->items.size()) * sizeof(Value));
      out.reserve(a.list()->items.size() + b.list()->items.size());
      out = a.list()->items;
      out.insert(out.end(), b.list()->items.begin(), b.list()->items.end());
      return budget.list(std::move(out), a.is_tuple() ? ListKind::kTuple : ListKind::kList);
    }
  }
  Integer count = 0;
  if (sign == "*" && (find_integer(b, count) || find_integer(a, count))) {
    const Value& part = find_integer(b, count) ? a : b;
    if (part.text() != nullptr) return repeated_text(budget, part, count);
    if (part.list() != nullptr) return repeated_list(budget, *part.list(), count);
  }
  refuse(budget, a, sign, b);
}

Value negated(Budget& budget, const Value& value) {
  require_defined(value);
  TWELL_REQUIRE(value.is_number(), "-{} makes no sense", shown(budget, value));
  if (value.real() != nullptr) return Value::of(-*value.real());
  return calculated("-", Value::of(int64_t{0}), value);
}

Value positive(Budget& budget, const Value& value) {
  require_defined(value);
  TWELL_REQUIRE(value.is_number(), "+{} makes no sense", shown(budget, value));
  return value.boolean() != nullptr ? Value::of(Integer{*value.boolean()}) : value;
}

std::unique_ptr<Iterator> try_iterate(Budget& budget, const Value& value) {
  if (value.list() != nullptr) return std::make_unique<ListItems>(value, false);
  if (value.text() != nullptr) return std::make_unique<Characters>(budget, value);
  if (value.dict() != nullptr) {
    return std::make_unique<DictItems>(budget, std::get<std::shared_ptr<const Dict>>(value.data()),
                                       ViewKind::kKeys, false);
  }
  if (const View* view = value.view()) {
    return std::make_unique<DictItems>(budget, view->dict, view->kind, false);
  }
  if (value.range() != nullptr) return std::make_unique<RangeItems>(*value.range(), false);
  if (value.generator() != nullptr) return std::make_unique<Rest>(value);
  if (value.is_undefined()) return std::make_unique<Nothing>();
  return nullptr;
}

std::unique_ptr<Iterator> iterate_list(std::vector<Value> items) {
  return std::make_unique<OwnItems>(std::move(items));
}

std::unique_ptr<Iterator> iterate(Budget& budget, const Value& value) {
  auto items = try_iterate(budget, value);
  TWELL_REQUIRE(items != nullptr, "{} cannot be looped over", shown(budget, value));
  return items;
}

std::unique_ptr<Iterator> try_iterate_back(Budget& budget, const Value& value) {
  if (value.list() != nullptr) return std::make_unique<ListItems>(value, true);
  if (value.dict() != nullptr) {
    return std::make_unique<DictItems>(budget, std::get<std::shared_ptr<const Dict>>(value.data()),
                                       ViewKind::kKeys, true);
  }
  if (const View* view = value.view()) {
    return std::make_unique<DictItems>(budget, view->dict, view->kind, true);
  }
  if (value.range() != nullptr) return std::make_unique<RangeItems>(*value.range(), true);
  return nullptr;
}

std::vector<Value> items_of(Budget& budget, const Value& value) {
  std::vector<Value> out;
  if (const List* list = value.list()) {
    budget.bytes(list->items.size() * sizeof(Value));
    return list->items;
  }
  const auto items = iterate(budget, value);
  for (Value item; items->next(item);) {
    budget.step();
    budget.append(out, item);
  }
  return out;
}

bool find_length(Budget& budget, const Value& value, Integer& length) {
  if (const List* list = value.list()) {
    length = std::ssize(list->items);
  } else if (const Dict* dict = value.dict()) {
    length = std::ssize(dict->items);
  } else if (const std::string* text = value.text()) {
    budget.bytes(text->size());
    length = count_code_points(*text);
  } else if (const View* view = value.view()) {
    length = std::ssize(view->dict->items);
  } else if (const Range* range = value.range()) {
    length = range->count();
  } else if (value.is_undefined()) {
    length = 0;
  } else {
    return value.object() != nullptr && value.object()->length(budget, length);
  }
  return true;
}

bool find_integer(const Value& value, Integer& found) {
  if (value.boolean() != nullptr) return found = Integer{*value.boolean()}, true;
  if (value.integer() != nullptr) return found = *value.integer(), true;
  return false;
}

Integer want_integer(Budget& budget, const Value& value, std::string_view what) {
  require_defined(value);
  Integer found = 0;
  TWELL_REQUIRE(find_integer(value, found), "{} needs a whole number, not {}", what,
                shown(budget, value));
  return found;
}

int64_t want_count(Budget& budget, const Value& value, std::string_view what) {
  const Integer found = want_integer(budget, value, what);
  return static_cast<int64_t>(std::clamp<Integer>(found, INT64_MIN, INT64_MAX));
}

const std::string& want_text(Budget& budget, const Value& value, std::string_view what) {
  require_defined(value);
  TWELL_REQUIRE(value.text() != nullptr, "{} needs a text, not {}", what, shown(budget, value));
  return *value.text();
}

}  // namespace twell::jinja
