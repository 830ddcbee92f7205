// SPDX-License-Identifier: Apache-2.0
// Filters of lists, dictionaries and other things with items. As in jinja2, some give a generator,
// which computes its items when they are asked for, once.
#include <algorithm>
#include <iterator>
#include <set>

#include "twell/chat_template/jinja/access.h"
#include "twell/chat_template/jinja/filters.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/text.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

Value ignoring_case(Budget& budget, const Value& value) {
  return value.text() != nullptr ? budget.text(lower(budget, *value.text())) : value;
}

// What items are compared by: an attribute, and texts without their case.
class Key {
 public:
  Key(const FilterCall& call, const Value& attribute, bool case_sensitive,
      const Value* fallback = nullptr)
      : budget_(call.budget),
        path_(call.budget, attribute),
        case_sensitive_(case_sensitive),
        fallback_(fallback == nullptr ? Value::none() : *fallback) {}
  Value of(const Value& item) const {
    Value found = path_.get(budget_, item, &fallback_);
    return case_sensitive_ ? found : ignoring_case(budget_, found);
  }

 private:
  Budget& budget_;
  AttributePath path_;
  bool case_sensitive_;
  Value fallback_;
};

// ---- length, ends, order

Value length(const FilterCall& call) {
  Integer found = 0;
  TWELL_REQUIRE(find_length(call.budget, call.value, found), "{} ({}) has no length",
                shown(call.budget, call.value), type_name(call.value));
  return Value::of(found);
}

Value list_filter(const FilterCall& call) {
  return call.budget.list(items_of(call.budget, call.value));
}

Value first(const FilterCall& call) {
  Value item;
  return iterate(call.budget, call.value)->next(item) ? item : Value();
}

Value last(const FilterCall& call) {
  if (call.value.text() != nullptr) {
    return get_item(call.budget, call.value, Value::of(int64_t{-1}));
  }
  Value item;
  if (call.value.is_undefined()) throw InputError("last needs a sequence, not an undefined value");
  const auto items = try_iterate_back(call.budget, call.value);
  TWELL_REQUIRE(items != nullptr, "{} has no last item", shown(call.budget, call.value));
  return items->next(item) ? item : Value();
}

Value reverse(const FilterCall& call) {
  Budget& budget = call.budget;
  if (call.value.text() != nullptr) {
    return get_slice(budget, call.value, Value::none(), Value::none(), Value::of(int64_t{-1}));
  }
  auto back = try_iterate_back(budget, call.value);
  if (back != nullptr) return budget.generator(std::move(back), call.value.depth() + 1);
  std::vector<Value> items = items_of(budget, call.value);
  std::reverse(items.begin(), items.end());
  return budget.list(std::move(items));
}

// Items with what they are ordered by, in order. Stable, as Python's sorted().
std::vector<std::pair<Value, Value>> sorted(Budget& budget,
                                            std::vector<std::pair<Value, Value>> items,
                                            bool reversed) {
  std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) {
    return reversed ? less(budget, b.first, a.first) : less(budget, a.first, b.first);
  });
  return items;
}

Value second_of(Budget& budget, std::vector<std::pair<Value, Value>> items) {
  std::vector<Value> out;
  out.reserve(items.size());
  for (auto& [key, item] : items) out.push_back(std::move(item));
  return budget.list(std::move(out));
}

Value sort(const FilterCall& call) {
  Budget& budget = call.budget;
  const bool reversed = call.flag(0), case_sensitive = call.flag(1);
  const Value attribute = call.get(2, Value::none());
  std::vector<Key> keys;  // several attributes are separated by commas
  if (const std::string* text = attribute.text()) {
    for (const std::string_view part : split(budget, *text, ",", -1)) {
      keys.emplace_back(call, budget.text(std::string(part)), case_sensitive);
    }
  } else {
    keys.emplace_back(call, attribute, case_sensitive);
  }
  std::vector<std::pair<Value, Value>> items;
  for (const Value& item : items_of(budget, call.value)) {
    std::vector<Value> key;
    for (const Key& part : keys) budget.append(key, part.of(item));
    items.emplace_back(budget.list(std::move(key)), item);
  }
  return second_of(budget, sorted(budget, std::move(items), reversed));
}

Value dict_sort(const FilterCall& call) {
  Budget& budget = call.budget;
  const bool case_sensitive = call.flag(0), reversed = call.flag(2);
  const std::string by =
      call.given[1] ? want_text(budget, *call.given[1], "dictsort") : std::string("key");
  TWELL_REQUIRE(by == "key" || by == "value", "dictsort orders by key or value, not {}", by);
  TWELL_REQUIRE(call.value.dict() != nullptr, "dictsort needs a dictionary, not {}",
                shown(budget, call.value));
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [key, value] : call.value.dict()->items) {
    const Value& ordered_by = by == "key" ? key : value;
    budget.bytes(2 * sizeof(Value));
    items.emplace_back(case_sensitive ? ordered_by : ignoring_case(budget, ordered_by),
                       budget.list({key, value}, ListKind::kTuple));
  }
  return second_of(budget, sorted(budget, std::move(items), reversed));
}

template <bool kLargest>
Value extreme(const FilterCall& call) {
  Budget& budget = call.budget;
  const Key key(call, call.get(1, Value::none()), call.flag(0));
  const auto items = iterate(budget, call.value);
  Value best, best_key;
  bool any = false;
  for (Value item; items->next(item);) {
    Value item_key = key.of(item);
    if (!any || (kLargest ? less(budget, best_key, item_key) : less(budget, item_key, best_key))) {
      best = item;
      best_key = std::move(item_key);
    }
    any = true;
  }
  return best;
}

Value sum(const FilterCall& call) {
  Budget& budget = call.budget;
  const AttributePath path(budget, call.get(0, Value::none()));
  Value total = call.get(1, Value::of(int64_t{0}));
  TWELL_REQUIRE(total.text() == nullptr, "sum adds no texts");
  const auto items = iterate(budget, call.value);
  for (Value item; items->next(item);) {
    total = arithmetic(budget, "+", total, path.get(budget, item));
  }
  return total;
}

Value join(const FilterCall& call) {
  Budget& budget = call.budget;
  const std::string by = call.given[0] != nullptr ? to_text(budget, *call.given[0]) : "";
  const AttributePath path(budget, call.get(1, Value::none()));
  const auto items = iterate(budget, call.value);
  std::string out;
  bool is_first = true;
  for (Value item; items->next(item);) {
    budget.step();
    if (!std::exchange(is_first, false)) budget.append(out, by);
    append_str(budget, path.get(budget, item), out);
  }
  return budget.text(std::move(out));
}

Value group_by(const FilterCall& call) {
  Budget& budget = call.budget;
  const bool case_sensitive = call.flag(2);
  const Key key(call, *call.given[0], case_sensitive, call.given[1]);
  std::vector<std::pair<Value, Value>> items;
  for (const Value& item : items_of(budget, call.value)) {
    budget.bytes(2 * sizeof(Value));
    items.emplace_back(key.of(item), item);
  }
  items = sorted(budget, std::move(items), false);
  const Key shown_key(call, *call.given[0], true, call.given[1]);
  std::vector<Value> groups;
  for (size_t begin = 0; begin < items.size();) {
    std::vector<Value> group;
    const Value grouper = case_sensitive ? items[begin].first : shown_key.of(items[begin].second);
    size_t end = begin;
    for (; end < items.size() && equal(budget, items[begin].first, items[end].first); ++end) {
      budget.append(group, items[end].second);
    }
    end = std::max(end, begin + 1);  // nan is not equal to itself
    if (group.empty()) group.push_back(items[begin].second);
    groups.push_back(budget.list({grouper, budget.list(std::move(group))}, ListKind::kGroup));
    begin = end;
  }
  return budget.list(std::move(groups));
}

// ---- generators

Value once(Budget& budget, std::vector<Value> items) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  return budget.generator(iterate_list(std::move(items)), depth + 1);
}

Value items_filter(const FilterCall& call) {
  if (call.value.is_undefined()) return once(call.budget, {});
  TWELL_REQUIRE(call.value.dict() != nullptr, "items is for dictionaries, not for {}",
                shown(call.budget, call.value));
  const Value view = call.budget.view(call.value, ViewKind::kItems);
  return call.budget.generator(iterate(call.budget, view), view.depth() + 1);
}

Value batch(const FilterCall& call) {
  Budget& budget = call.budget;
  const int64_t size = want_count(budget, *call.given[0], "batch");
  std::vector<Value> out, row;
  for (const Value& item : items_of(budget, call.value)) {
    if (std::ssize(row) == size) out.push_back(budget.list(std::exchange(row, {})));
    budget.append(row, item);
  }
  if (!row.empty()) {
    while (call.has(1) && std::ssize(row) < size) budget.append(row, *call.given[1]);
    out.push_back(budget.list(std::move(row)));
  }
  return once(budget, std::move(out));
}

Value slice(const FilterCall& call) {
  Budget& budget = call.budget;
  const std::vector<Value> items = items_of(budget, call.value);
  const int64_t count = want_count(budget, *call.given[0], "slice");
  TWELL_REQUIRE(count != 0, "slice cannot cut into 0 lists");
  std::vector<Value> out;
  size_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool longer = i < std::ssize(items) % count;
    const size_t end = begin + static_cast<size_t>(std::ssize(items) / count + (longer ? 1 : 0));
    std::vector<Value> row;
    for (size_t at = begin; at < end; ++at) budget.append(row, items[at]);
    if (call.has(1) && !longer) budget.append(row, *call.given[1]);
    out.push_back(budget.list(std::move(row)));
    begin = end;
  }
  return once(budget, std::move(out));
}

class Unique : public Iterator {
 public:
  Unique(const FilterCall& call)
      : key_(call, call.get(1, Value::none()), call.flag(0)),
        budget_(call.budget),
        items_(iterate(call.budget, call.value)) {}
  bool next(Value& item) override {
    while (items_->next(item)) {
      const Value key = key_.of(item);
      TWELL_REQUIRE(can_be_key(key), "unique cannot compare {}", shown(budget_, key));
      budget_.step();
      budget_.bytes(3 * sizeof(Value));
      if (seen_.insert(key).second) return true;
    }
    return false;
  }

 private:
  struct Less {
    bool operator()(const Value& a, const Value& b) const { return compare_keys(a, b) < 0; }
  };
  Key key_;
  Budget& budget_;
  std::unique_ptr<Iterator> items_;
  std::set<Value, Less> seen_;
};

Value unique(const FilterCall& call) {
  return call.budget.generator(std::make_unique<Unique>(call), call.value.depth() + 1);
}

// The filter or test that map, select and the like apply to each item, with its arguments.
struct Applied {
  std::string name;
  Arguments arguments;
};

Applied applied(const FilterCall& call, size_t skipped) {
  const std::vector<Value>& given = call.arguments.positional;
  Applied out{want_text(call.budget, given[skipped], "the name of a filter or test"), {}};
  out.arguments.positional.assign(given.begin() + static_cast<ptrdiff_t>(skipped) + 1, given.end());
  out.arguments.named = call.arguments.named;
  return out;
}

class MapAttribute : public Iterator {
 public:
  MapAttribute(const FilterCall& call, const Value& attribute, Value fallback)
      : budget_(call.budget),
        path_(call.budget, attribute),
        fallback_(std::move(fallback)),
        items_(iterate(call.budget, call.value)) {}
  bool next(Value& item) override {
    if (!items_->next(item)) return false;
    item = path_.get(budget_, item, &fallback_);
    return true;
  }

 private:
  Budget& budget_;
  AttributePath path_;
  Value fallback_;
  std::unique_ptr<Iterator> items_;
};

class MapFilter : public Iterator {
 public:
  MapFilter(const FilterCall& call)
      : budget_(call.budget), filter_(applied(call, 0)), items_(iterate(call.budget, call.value)) {}
  bool next(Value& item) override {
    if (!items_->next(item)) return false;
    const Value before = item;
    item = apply_filter(budget_, filter_.name, before, filter_.arguments);
    return true;
  }

 private:
  Budget& budget_;
  Applied filter_;
  std::unique_ptr<Iterator> items_;
};

Value map(const FilterCall& call) {
  Budget& budget = call.budget;
  const Arguments& given = call.arguments;
  const int depth = call.value.depth() + 1;
  if (!truthy(call.value)) return once(budget, {});
  const auto named = [&](std::string_view name) {
    const auto found = std::find_if(given.named.begin(), given.named.end(),
                                    [&](const auto& item) { return item.first == name; });
    return found == given.named.end() ? nullptr : &found->second;
  };
  const Value* attribute = named("attribute");
  if (given.positional.empty() && attribute != nullptr) {
    for (const auto& [name, value] : given.named) {
      TWELL_REQUIRE(name == "attribute" || name == "default", "map knows no argument '{}'", name);
    }
    const Value* fallback = named("default");
    return budget.generator(std::make_unique<MapAttribute>(
                                call, *attribute, fallback == nullptr ? Value::none() : *fallback),
                            depth);
  }
  TWELL_REQUIRE(!given.positional.empty(), "map needs a filter or an attribute");
  return budget.generator(std::make_unique<MapFilter>(call), depth);
}

class Select : public Iterator {
 public:
  Select(const FilterCall& call, bool wanted, bool by_attribute)
      : budget_(call.budget),
        wanted_(wanted),
        path_(call.budget, by_attribute ? call.arguments.positional[0] : Value::none()),
        items_(iterate(call.budget, call.value)) {
    const size_t skipped = by_attribute ? 1 : 0;
    if (call.arguments.positional.size() > skipped) test_ = applied(call, skipped);
  }
  bool next(Value& item) override {
    while (items_->next(item)) {
      budget_.step();
      const Value tested = path_.get(budget_, item);
      const bool holds = test_.name.empty()
                             ? truthy(tested)
                             : apply_test(budget_, test_.name, tested, test_.arguments);
      if (holds == wanted_) return true;
    }
    return false;
  }

 private:
  Budget& budget_;
  bool wanted_;
  AttributePath path_;
  Applied test_;
  std::unique_ptr<Iterator> items_;
};

template <bool kWanted, bool kByAttribute>
Value select(const FilterCall& call) {
  if (!truthy(call.value)) return once(call.budget, {});
  TWELL_REQUIRE(!kByAttribute || !call.arguments.positional.empty(),
                "selectattr and rejectattr need an attribute");
  return call.budget.generator(std::make_unique<Select>(call, kWanted, kByAttribute),
                               call.value.depth() + 1);
}

constexpr FilterEntry kSequenceFilters[] = {
    {"batch", "linecount fill_with?", batch},
    {"count", "", length},
    {"dictsort", "case_sensitive? by? reverse?", dict_sort},
    {"first", "", first},
    {"groupby", "attribute default? case_sensitive?", group_by},
    {"items", "", items_filter},
    {"join", "d? attribute?", join},
    {"last", "", last},
    {"length", "", length},
    {"list", "", list_filter},
    {"map", "...", map},
    {"max", "case_sensitive? attribute?", extreme<true>},
    {"min", "case_sensitive? attribute?", extreme<false>},
    {"reject", "...", select<false, false>},
    {"rejectattr", "...", select<false, true>},
    {"reverse", "", reverse},
    {"select", "...", select<true, false>},
    {"selectattr", "...", select<true, true>},
    {"slice", "slices fill_with?", slice},
    {"sort", "reverse? case_sensitive? attribute?", sort},
    {"sum", "attribute? start?", sum},
    {"unique", "case_sensitive? attribute?", unique},
};

}  // namespace

const FilterEntry* find_sequence_filter(std::string_view name) {
  const auto* found = std::find_if(std::begin(kSequenceFilters), std::end(kSequenceFilters),
                                   [&](const FilterEntry& e) { return e.name == name; });
  return found == std::end(kSequenceFilters) ? nullptr : found;
}

}  // namespace twell::jinja
