// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/objects.h"

#include <algorithm>

#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

// A method of an object, bound to it.
Value bound(Budget& budget, Object* self, const MethodEntry& entry) {
  budget.bytes(sizeof(Method));
  return Value(Value::Data(
      std::shared_ptr<const Method>(std::make_shared<Method>(Method{Value::of(self), &entry}))));
}

template <typename T>
T& self_of(const Value& self) {
  return static_cast<T&>(*self.object());
}

constexpr MethodEntry kLoopCycle = {
    "cycle", "*", [](Budget& /*budget*/, const Value& self, const Arguments& arguments) {
      return self_of<Loop>(self).cycle(arguments);
    }};
constexpr MethodEntry kLoopChanged = {
    "changed", "*", [](Budget& budget, const Value& self, const Arguments& arguments) {
      return Value::of(self_of<Loop>(self).changed(budget, arguments));
    }};
constexpr MethodEntry kCyclerNext = {
    "next", "", [](Budget& /*budget*/, const Value& self, const Arguments& /*arguments*/) {
      Cycler& cycler = self_of<Cycler>(self);
      Value item = cycler.current();
      cycler.advance();
      return item;
    }};
constexpr MethodEntry kCyclerReset = {
    "reset", "", [](Budget& /*budget*/, const Value& self, const Arguments& /*arguments*/) {
      self_of<Cycler>(self).reset();
      return Value::none();
    }};

}  // namespace

bool Namespace::find(Budget& budget, const std::string& name, Value& found) {
  budget.bytes(name.size());
  const auto field = fields_.find(name);
  if (field == fields_.end()) return false;
  found = field->second;
  return true;
}

void Namespace::set(Budget& budget, const std::string& name, Value value) {
  budget.bytes(name.size());
  const auto [field, added] = fields_.insert_or_assign(name, std::move(value));
  if (!added) return;
  budget.bytes(2 * name.size() + 2 * sizeof(Value));
  order_.push_back(name);
}

std::string Namespace::repr(Budget& budget, int /*depth*/) {
  std::string out = "<Namespace {";
  for (const std::string& name : order_) {
    if (out.back() != '{') budget.append(out, ", ");
    append_quoted(budget, name, out);
    budget.append(out, ": ");
    append_repr(budget, fields_.find(name)->second, out);
  }
  return out + "}>";
}

bool Loop::has_next() {
  if (!has_after_) has_after_ = items_ != nullptr && items_->next(after_);
  return has_after_;
}

bool Loop::next(Value& item) {
  if (!has_next()) return false;
  has_after_ = false;
  ++index0_;
  before_ = std::move(current_);
  current_ = after_;
  item = current_;
  return true;
}

void Loop::finish() {
  items_ = nullptr;
  has_after_ = false;
}

Integer Loop::size(Budget& budget) {
  if (size_ >= 0) return size_;
  if (!filtered_ && find_length(budget, source_, size_)) return size_;
  std::vector<Value> rest;
  for (Value item; items_ != nullptr && items_->next(item);) budget.append(rest, item);
  size_ = std::ssize(rest) + index0_ + 1 + (has_after_ ? 1 : 0);
  items_ = iterate_list(std::move(rest));
  return size_;
}

bool Loop::length(Budget& budget, Integer& length) {
  length = size(budget);
  return true;
}

bool Loop::find(Budget& budget, const std::string& name, Value& found) {
  const Integer index0 = index0_;
  if (name == "index0") return found = Value::of(index0), true;
  if (name == "index") return found = Value::of(index0 + 1), true;
  if (name == "first") return found = Value::of(index0 == 0), true;
  if (name == "last") return found = Value::of(!has_next()), true;
  if (name == "length") return found = Value::of(size(budget)), true;
  if (name == "revindex") return found = Value::of(size(budget) - index0), true;
  if (name == "revindex0") return found = Value::of(size(budget) - index0 - 1), true;
  if (name == "depth0") return found = Value::of(int64_t{depth0_}), true;
  if (name == "depth") return found = Value::of(int64_t{depth0_} + 1), true;
  if (name == "previtem") return found = index0 == 0 ? Value() : before_, true;
  if (name == "nextitem") return found = has_next() ? after_ : Value(), true;
  if (name == "cycle") return found = bound(budget, this, kLoopCycle), true;
  if (name == "changed") return found = bound(budget, this, kLoopChanged), true;
  return false;
}

std::string Loop::repr(Budget& budget, int /*depth*/) {
  return fmt::format("<LoopContext {}/{}>", index0_ + 1, size(budget));
}

Value Loop::cycle(const Arguments& arguments) const {
  TWELL_REQUIRE(arguments.named.empty() && !arguments.positional.empty(),
                "loop.cycle needs items by position");
  return arguments.positional[static_cast<size_t>(index0_) % arguments.positional.size()];
}

bool Loop::changed(Budget& budget, const Arguments& arguments) {
  TWELL_REQUIRE(arguments.named.empty(), "loop.changed takes values by position");
  const std::vector<Value>& values = arguments.positional;
  const bool same =
      asked_ && std::equal(values.begin(), values.end(), last_.begin(), last_.end(),
                           [&](const Value& a, const Value& b) { return equal(budget, a, b); });
  asked_ = true;
  last_ = values;
  return !same;
}

bool Cycler::find(Budget& budget, const std::string& name, Value& found) {
  if (name == "current") return found = current(), true;
  if (name == "next") return found = bound(budget, this, kCyclerNext), true;
  if (name == "reset") return found = bound(budget, this, kCyclerReset), true;
  return false;
}

bool Joiner::find(Budget& /*budget*/, const std::string& name, Value& found) {
  if (name == "sep") return found = separator_, true;
  if (name == "used") return found = Value::of(used_), true;
  return false;
}

Value Joiner::call(Budget& budget) {
  return std::exchange(used_, true) ? separator_ : budget.text("");
}

}  // namespace twell::jinja
