// SPDX-License-Identifier: Apache-2.0
// Tests of jinja2: what follows "is".
#include <algorithm>
#include <iterator>

#include "twell/chat_template/jinja/filters.h"
#include "twell/chat_template/jinja/methods.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

struct TestCall {
  Budget& budget;
  const Value& value;
  Matched given;
};
struct TestEntry {
  std::string_view name;
  std::string_view parameters;
  bool (*holds)(const TestCall& call);
};

bool is_truth(const Value& value, bool wanted) {
  return value.boolean() != nullptr && *value.boolean() == wanted;
}

bool has_rest(const TestCall& call, int64_t wanted) {
  const Value rest = arithmetic(call.budget, "%", call.value, Value::of(int64_t{2}));
  return equal(call.budget, rest, Value::of(wanted));
}

bool divisible(const TestCall& call) {
  const Value rest = arithmetic(call.budget, "%", call.value, *call.given[0]);
  return equal(call.budget, rest, Value::of(int64_t{0}));
}

bool is_sequence(const TestCall& call) {
  const Value& v = call.value;
  return v.list() != nullptr || v.text() != nullptr || v.dict() != nullptr ||
         v.range() != nullptr || v.is_undefined();
}

bool is_callable(const TestCall& call) {
  const Value& v = call.value;
  return v.is_undefined() || v.method() != nullptr || v.function() != nullptr ||
         (v.object() != nullptr && v.object()->callable());
}

// Looking a character's class up takes the time of copying several.
bool has_case(const TestCall& call, bool (*in_case)(std::string_view text)) {
  const std::string text = to_text(call.budget, call.value);
  call.budget.bytes(8 * text.size());
  return in_case(text);
}

// Python's "is". Small whole numbers are the same object there, and so are equal constants.
bool is_same(const TestCall& call) {
  const Value &a = call.value, &b = *call.given[0];
  if (a.data().index() != b.data().index()) return false;
  if (a.is_none() || a.is_number()) return equal(call.budget, a, b);
  if (a.is_undefined()) return false;
  if (a.text() != nullptr) return a.text() == b.text();
  return a.list() == b.list() && a.dict() == b.dict() && a.view() == b.view() &&
         a.range() == b.range() && a.generator() == b.generator() && a.method() == b.method() &&
         a.function() == b.function() && a.object() == b.object();
}

template <char kFirst, bool kOrEqual>
bool compare(const TestCall& call) {
  constexpr std::string_view sign = kFirst == '<' ? (kOrEqual ? "<=" : "<") : kOrEqual ? ">=" : ">";
  return ordered(call.budget, sign, call.value, *call.given[0]);
}
bool equals(const TestCall& call) { return equal(call.budget, call.value, *call.given[0]); }
bool differs(const TestCall& call) { return !equals(call); }

constexpr TestEntry kTests[] = {
    {"odd", "", [](const TestCall& c) { return has_rest(c, 1); }},
    {"even", "", [](const TestCall& c) { return has_rest(c, 0); }},
    {"divisibleby", "num", divisible},
    {"defined", "", [](const TestCall& c) { return !c.value.is_undefined(); }},
    {"undefined", "", [](const TestCall& c) { return c.value.is_undefined(); }},
    {"filter", "",
     [](const TestCall& c) { return c.value.text() != nullptr && is_filter(*c.value.text()); }},
    {"test", "",
     [](const TestCall& c) { return c.value.text() != nullptr && is_test(*c.value.text()); }},
    {"none", "", [](const TestCall& c) { return c.value.is_none(); }},
    {"boolean", "", [](const TestCall& c) { return c.value.boolean() != nullptr; }},
    {"false", "", [](const TestCall& c) { return is_truth(c.value, false); }},
    {"true", "", [](const TestCall& c) { return is_truth(c.value, true); }},
    {"integer", "", [](const TestCall& c) { return c.value.integer() != nullptr; }},
    {"float", "", [](const TestCall& c) { return c.value.real() != nullptr; }},
    {"lower", "", [](const TestCall& c) { return has_case(c, is_lower_text); }},
    {"upper", "", [](const TestCall& c) { return has_case(c, is_upper_text); }},
    {"string", "", [](const TestCall& c) { return c.value.text() != nullptr; }},
    {"mapping", "", [](const TestCall& c) { return c.value.dict() != nullptr; }},
    {"number", "", [](const TestCall& c) { return c.value.is_number(); }},
    {"sequence", "", is_sequence},
    {"iterable", "", [](const TestCall& c) { return try_iterate(c.budget, c.value) != nullptr; }},
    {"callable", "", is_callable},
    {"sameas", "other", is_same},
    {"escaped", "", [](const TestCall& c) { return c.value.is_markup(); }},
    {"in", "seq", [](const TestCall& c) { return contains(c.budget, c.value, *c.given[0]); }},
    {"==", "other /", equals},
    {"eq", "other /", equals},
    {"equalto", "other /", equals},
    {"!=", "other /", differs},
    {"ne", "other /", differs},
    {">", "other /", compare<'>', false>},
    {"gt", "other /", compare<'>', false>},
    {"greaterthan", "other /", compare<'>', false>},
    {"ge", "other /", compare<'>', true>},
    {">=", "other /", compare<'>', true>},
    {"<", "other /", compare<'<', false>},
    {"lt", "other /", compare<'<', false>},
    {"lessthan", "other /", compare<'<', false>},
    {"<=", "other /", compare<'<', true>},
    {"le", "other /", compare<'<', true>},
};

const TestEntry* find_test(std::string_view name) {
  const auto* found = std::find_if(std::begin(kTests), std::end(kTests),
                                   [&](const TestEntry& e) { return e.name == name; });
  return found == std::end(kTests) ? nullptr : found;
}

}  // namespace

bool is_test(std::string_view name) { return find_test(name) != nullptr; }

bool apply_test(Budget& budget, std::string_view name, const Value& value,
                const Arguments& arguments) {
  budget.step();
  const TestEntry* entry = find_test(name);
  TWELL_REQUIRE(entry != nullptr, "there is no test named '{}'", name);
  return entry->holds(
      {budget, value, match(fmt::format("the test '{}'", name), entry->parameters, arguments)});
}

}  // namespace twell::jinja
