// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/renderer.h"

#include <algorithm>
#include <utility>

#include "twell/chat_template/jinja/access.h"
#include "twell/chat_template/jinja/filters.h"
#include "twell/chat_template/jinja/methods.h"
#include "twell/chat_template/jinja/objects.h"
#include "twell/chat_template/jinja/operators.h"
#include "twell/chat_template/jinja/write.h"

namespace twell::jinja {
namespace {

using Kind = ExpressionKind;

// A call of a function of the template: the values of its variables.
struct Activation {
  Activation(Activation* outer_in, int slots)
      : outer(outer_in), values(static_cast<size_t>(slots)) {}

  Value& at(Place place) {
    Activation* call = this;
    for (int i = 0; i < place.hops; ++i) call = call->outer;
    return call->values[static_cast<size_t>(place.slot)];
  }
  Value& at(int slot) { return values[static_cast<size_t>(slot)]; }

  Activation* outer;
  std::vector<Value> values;
  bool captured = false;  // something that may outlive the call refers to it
};

// A macro or the body of a call block, with the call that defined it.
class Macro : public Object {
 public:
  Macro(const Statement& definition, Activation& home) : definition_(definition), home_(home) {}
  const Statement& definition() const { return definition_; }
  Activation& home() const { return home_; }

  const char* type() const override { return "Macro"; }
  bool callable() const override { return true; }
  std::string repr(Budget& /*budget*/, int /*depth*/) override {
    return definition_.text.empty() ? "<Macro anonymous>"
                                    : fmt::format("<Macro '{}'>", definition_.text);
  }
  bool find(Budget& budget, const std::string& name, Value& found) override {
    const Signature& signature = definition_.signature;
    if (name == "name") {
      found = definition_.text.empty() ? Value::none() : budget.text(definition_.text);
    } else if (name == "arguments") {
      std::vector<Value> names;
      for (const Parameter& p : signature.parameters) names.push_back(budget.text(p.name));
      found = budget.list(std::move(names), ListKind::kTuple);
    } else if (name == "caller") {
      found = Value::of(signature.caller >= 0);
    } else if (name == "catch_kwargs") {
      found = Value::of(signature.keywords >= 0);
    } else if (name == "catch_varargs") {
      found = Value::of(signature.rest >= 0);
    } else {
      return false;
    }
    return true;
  }

 private:
  const Statement& definition_;
  Activation& home_;
};

class Renderer {
 public:
  Renderer(const Variables& variables, const RenderLimits& limits)
      : variables_(variables), budget_(limits) {}

  std::string whole(const Template& tree) {
    auto root = std::make_unique<Activation>(nullptr, tree.slots);
    calls_.push_back(std::move(root));
    Activation& call = *calls_.back();
    enter(tree.scope, call);
    run(tree.body, call);
    return std::move(out_);
  }
  int line() const { return line_; }

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  // ---- scopes

  Value from_context(const std::string& name) {
    budget_.bytes(name.size());
    const auto own = exported_.find(name);
    if (own != exported_.end()) return own->second;
    const auto given = variables_.find(name);
    if (given != variables_.end()) return given->second;
    const Function* function = find_function(name);
    return function != nullptr ? Value::of(function) : Value();
  }

  void enter(const Scope& scope, Activation& call) {
    budget_.steps(scope.loads.size());
    for (const auto& [slot, load] : scope.loads) {
      if (load.kind == Load::Kind::kUndefined) call.at(slot) = Value();
      if (load.kind == Load::Kind::kOuter) call.at(slot) = Value(call.at(load.outer));
      if (load.kind == Load::Kind::kContext) call.at(slot) = from_context(load.name);
    }
  }
  static void leave(const Scope& scope, Activation& call) {
    for (const auto& [slot, load] : scope.loads) call.at(slot) = Value();
  }

  static void capture(Activation& call) {
    for (Activation* at = &call; at != nullptr && !at->captured; at = at->outer) {
      at->captured = true;
    }
  }

  std::unique_ptr<Activation> new_call(Activation* outer, int slots) {
    budget_.bytes(sizeof(Activation) + static_cast<size_t>(slots) * sizeof(Value));
    return std::make_unique<Activation>(outer, slots);
  }
  // Keeps the call's variables when something still refers to them.
  void end_call(std::unique_ptr<Activation> call) {
    if (call->captured) calls_.push_back(std::move(call));
  }

  // The text that `body` appends to the output.
  template <typename Run>
  std::string captured_text(const Run& body) {
    std::string before = std::exchange(out_, {});
    body();
    return std::exchange(out_, std::move(before));
  }

  // ---- statements

  Flow run(const Body& body, Activation& call) {
    const Budget::Level level(budget_);
    for (const Statement& statement : body) {
      line_ = statement.line;
      budget_.step();
      const Flow flow = run(statement, call);
      if (flow != Flow::kNormal) return flow;
    }
    return Flow::kNormal;
  }

  Flow run(const Statement& s, Activation& call) {
    switch (s.kind) {
      case StatementKind::kText:
        budget_.append(out_, s.text);
        break;
      case StatementKind::kOutput:
        for (const ExpressionPtr& e : s.expressions) append_str(budget_, eval(*e, call), out_);
        break;
      case StatementKind::kFor:
        return run_for(s, call);
      case StatementKind::kIf:
        return run_if(s, call);
      case StatementKind::kSet:
        run_set(s, call);
        break;
      case StatementKind::kSetBlock:
      case StatementKind::kFilterBlock:
        return run_text_block(s, call);
      case StatementKind::kWith:
        return run_with(s, call);
      case StatementKind::kMacro:
        assign(*s.target, define(s, call), call);
        break;
      case StatementKind::kCallBlock:
        run_call_block(s, call);
        break;
      case StatementKind::kBlock:
        run_block(s);
        break;
      case StatementKind::kBreak:
        return Flow::kBreak;
      case StatementKind::kContinue:
        return Flow::kContinue;
      case StatementKind::kUnsupported:
        throw InputError(fmt::format("the statement '{}' is not supported", s.text));
    }
    return Flow::kNormal;
  }

  Flow run_if(const Statement& s, Activation& call) {
    if (truthy(eval(*s.expression, call))) return run(s.body, call);
    for (const Statement& branch : s.elifs) {
      budget_.step();
      if (truthy(eval(*branch.expression, call))) return run(branch.body, call);
    }
    return run(s.otherwise, call);
  }

  void run_set(const Statement& s, Activation& call) {
    require_namespaces(*s.target, call);
    Value value = eval(*s.expression, call);
    line_ = s.line;
    assign(*s.target, std::move(value), call);
  }

  // The body's text, through a filter, is assigned or printed.
  Flow run_text_block(const Statement& s, Activation& call) {
    enter(s.scope, call);
    Flow flow = Flow::kNormal;
    std::string text = captured_text([&] { flow = run(s.body, call); });
    if (flow != Flow::kNormal) return flow;
    line_ = s.line;
    block_text_ = budget_.text(std::move(text));
    Value value = s.expression != nullptr ? eval(*s.expression, call) : block_text_;
    if (s.kind == StatementKind::kFilterBlock) {
      append_str(budget_, value, out_);
    } else {
      assign(*s.target, std::move(value), call);
    }
    leave(s.scope, call);
    return Flow::kNormal;
  }

  Flow run_with(const Statement& s, Activation& call) {
    enter(s.scope, call);
    for (size_t i = 0; i < s.targets.size(); ++i) {
      Value value = eval(*s.expressions[i], call);
      assign(*s.targets[i], std::move(value), call);
    }
    const Flow flow = run(s.body, call);
    leave(s.scope, call);
    return flow;
  }

  void run_block(const Statement& s) {
    auto call = new_call(nullptr, s.slots);
    enter(s.scope, *call);
    run(s.body, *call);
    end_call(std::move(call));
  }

  // ---- assignment

  void require_namespaces(const Expression& target, Activation& call) {
    if (target.kind == Kind::kField) {
      TWELL_REQUIRE(dynamic_cast<Namespace*>(call.at(target.place).object()) != nullptr,
                    "{} is no namespace, so its fields cannot be set", target.name);
    }
    for (const ExpressionPtr& part : target.parts) require_namespaces(*part, call);
  }

  void assign(const Expression& target, Value value, Activation& call) {
    if (target.kind == Kind::kName) {
      if (target.exported) {
        budget_.bytes(target.name.size());
        exported_[target.name] = value;
      }
      call.at(target.place) = std::move(value);
    } else if (target.kind == Kind::kField) {
      auto* space = dynamic_cast<Namespace*>(call.at(target.place).object());
      TWELL_REQUIRE(space != nullptr, "{} is no namespace, so its fields cannot be set",
                    target.name);
      space->set(budget_, target.text, std::move(value));
    } else {
      const auto items = iterate(budget_, value);
      std::vector<Value> parts;
      for (Value item; parts.size() <= target.parts.size() && items->next(item);) {
        budget_.append(parts, item);
      }
      TWELL_REQUIRE(parts.size() == target.parts.size(), "{} names for {} values of {}",
                    target.parts.size(),
                    parts.size() < target.parts.size() ? std::to_string(parts.size()) : "more",
                    shown(budget_, value));
      for (size_t i = 0; i < parts.size(); ++i) {
        assign(*target.parts[i], std::move(parts[i]), call);
      }
    }
  }

  // ---- loops

  // The items for which a loop's condition holds. It is a function with a variable of its own.
  class Filtered : public Iterator {
   public:
    Filtered(Renderer& renderer, const Statement& loop, Activation& home,
             std::unique_ptr<Iterator> items)
        : renderer_(renderer),
          loop_(loop),
          call_(renderer.new_call(&home, loop.condition_slots)),
          items_(std::move(items)) {}
    bool next(Value& item) override {
      if (!std::exchange(entered_, true)) renderer_.enter(loop_.condition_scope, *call_);
      while (items_->next(item)) {
        renderer_.budget_.step();
        renderer_.assign(*loop_.condition_target, item, *call_);
        if (truthy(renderer_.eval(*loop_.condition, *call_))) return true;
      }
      return false;
    }

   private:
    Renderer& renderer_;
    const Statement& loop_;
    std::unique_ptr<Activation> call_;
    std::unique_ptr<Iterator> items_;
    bool entered_ = false;
  };

  Flow run_for(const Statement& s, Activation& call) {
    const Value items = eval(*s.expression, call);
    line_ = s.line;
    if (!s.recursive) return loop_over(s, items, call, call, 0);
    budget_.append(out_, recurse(s, items, call, 0));
    return Flow::kNormal;
  }

  // The text of a recursive loop over `items`; home: the call that the loop stands in.
  std::string recurse(const Statement& s, const Value& items, Activation& home, int depth0) {
    capture(home);  // because the variable `loop` refers to it
    auto call = new_call(&home, s.slots);
    std::string text = captured_text([&] { loop_over(s, items, home, *call, depth0); });
    end_call(std::move(call));
    return text;
  }

  // home: the call that the loop stands in; call: the one that its body runs in.
  Flow loop_over(const Statement& s, const Value& source, Activation& home, Activation& call,
                 int depth0) {
    std::unique_ptr<Iterator> items = iterate(budget_, source);
    if (s.condition != nullptr) {
      items = std::make_unique<Filtered>(*this, s, home, std::move(items));
    }
    Loop* loop = nullptr;
    if (s.loop_slot >= 0) {
      loop = heap_.make<Loop>(source, std::move(items), s.condition != nullptr, depth0);
      if (s.recursive) loop->set_recursion(&s, &home);
    }
    bool finished_one = false;  // a continue or break skips what jinja2 notes an item by
    Flow flow = Flow::kNormal;
    for (Value item; loop != nullptr ? loop->next(item) : items->next(item);) {
      line_ = s.line;
      budget_.step();
      assign(*s.target, std::move(item), call);
      if (loop != nullptr) call.at(s.loop_slot) = Value::of(loop);
      enter(s.scope, call);
      flow = run(s.body, call);
      if (flow == Flow::kBreak) break;
      if (flow == Flow::kNormal) finished_one = true;
    }
    leave(s.scope, call);
    if (loop != nullptr) loop->finish();
    if (finished_one || s.otherwise.empty()) return Flow::kNormal;
    enter(s.other_scope, call);
    flow = run(s.otherwise, call);
    leave(s.other_scope, call);
    return flow;
  }

  // ---- macros

  Value define(const Statement& s, Activation& call) {
    capture(call);
    return Value::of(heap_.make<Macro>(s, call));
  }

  void run_call_block(const Statement& s, Activation& call) {
    if (s.expression == nullptr) {  // generation
      auto inner = new_call(&call, s.slots);
      enter(s.scope, *inner);
      run(s.body, *inner);
      end_call(std::move(inner));
      return;
    }
    const Value caller = define(s, call);
    append_str(budget_, this->call(*s.expression, call, &caller), out_);
  }

  Value call_macro(const Macro& macro, Arguments given) {
    const Budget::Level level(budget_);
    const Statement& s = macro.definition();
    const Signature& signature = s.signature;
    auto call = new_call(&macro.home(), s.slots);
    std::vector<bool> bound(signature.parameters.size(), false);
    for (size_t i = 0; i < signature.parameters.size(); ++i) {
      const Parameter& p = signature.parameters[i];
      const auto named = std::find_if(given.named.begin(), given.named.end(),
                                      [&](const auto& item) { return item.first == p.name; });
      if (i < given.positional.size()) {
        call->at(p.slot) = given.positional[i];
      } else if (named != given.named.end()) {
        call->at(p.slot) = std::move(named->second);
        given.named.erase(named);
      } else {
        continue;
      }
      bound[i] = true;
    }
    if (signature.caller >= 0) {
      const auto caller = std::find_if(given.named.begin(), given.named.end(),
                                       [](const auto& item) { return item.first == "caller"; });
      if (caller != given.named.end()) {
        if (!caller->second.is_none()) call->at(signature.caller) = std::move(caller->second);
        given.named.erase(caller);
      }
    }
    bind_rest(s, given, *call);
    const int line = line_;
    enter(s.scope, *call);
    for (size_t i = 0; i < bound.size(); ++i) {
      const Parameter& p = signature.parameters[i];
      if (!bound[i] && p.fallback != nullptr) call->at(p.slot) = eval(*p.fallback, *call);
    }
    std::string text = captured_text([&] { run(s.body, *call); });
    line_ = line;
    end_call(std::move(call));
    return budget_.text(std::move(text));
  }

  // Arguments beyond the parameters: for the variables varargs and kwargs where the body uses them.
  void bind_rest(const Statement& s, Arguments& given, Activation& call) {
    const Signature& signature = s.signature;
    if (signature.keywords >= 0) {
      DictBuilder named;
      for (auto& [name, value] : given.named) named.add(budget_.text(name), std::move(value));
      call.at(signature.keywords) = budget_.dict(std::move(named));
    } else {
      TWELL_REQUIRE(given.named.empty(), "the macro '{}' has no parameter '{}'", s.text,
                    given.named.front().first);
    }
    std::vector<Value> rest;
    for (size_t i = signature.parameters.size(); i < given.positional.size(); ++i) {
      rest.push_back(std::move(given.positional[i]));
    }
    TWELL_REQUIRE(rest.empty() || signature.rest >= 0, "the macro '{}' takes {} arguments, not {}",
                  s.text, signature.parameters.size(), given.positional.size());
    if (signature.rest >= 0) {
      call.at(signature.rest) = budget_.list(std::move(rest), ListKind::kTuple);
    }
  }

  // ---- calls

  Arguments arguments(const Expression& e, Activation& call) {
    Arguments out;
    for (size_t i = 1; i < e.parts.size(); ++i) {
      budget_.append(out.positional, eval(*e.parts[i], call));
    }
    for (const auto& [name, part] : e.named) out.named.emplace_back(name, eval(*part, call));
    if (e.star != nullptr) {
      const auto items = iterate(budget_, eval(*e.star, call));
      for (Value item; items->next(item);) {
        budget_.step();
        budget_.append(out.positional, item);
      }
    }
    if (e.double_star != nullptr) {
      const Value named = eval(*e.double_star, call);
      TWELL_REQUIRE(named.dict() != nullptr, "** needs a dictionary, not {}",
                    shown(budget_, named));
      for (const auto& [key, value] : named.dict()->items) {
        const std::string& name = want_text(budget_, key, "the name of an argument");
        budget_.bytes(name.size() + sizeof(std::pair<std::string, Value>));
        out.named.emplace_back(name, value);
      }
    }
    line_ = e.line;
    return out;
  }

  // caller: what a call block gives to the macro; null: nothing.
  Value call(const Expression& e, Activation& call, const Value* caller) {
    const Value target = eval(*e.parts[0], call);
    Arguments given = arguments(e, call);
    if (caller != nullptr) given.named.emplace_back("caller", *caller);
    return apply(target, std::move(given));
  }

  Value apply(const Value& target, Arguments given) {
    require_defined(target);
    if (const Method* method = target.method()) return call_method(budget_, *method, given);
    if (const Function* function = target.function()) {
      return function->call(heap_, budget_, given);
    }
    if (auto* macro = dynamic_cast<Macro*>(target.object())) {
      return call_macro(*macro, std::move(given));
    }
    if (auto* joiner = dynamic_cast<Joiner*>(target.object())) {
      match("a joiner", "", given);
      return joiner->call(budget_);
    }
    auto* loop = dynamic_cast<Loop*>(target.object());
    TWELL_REQUIRE(loop != nullptr && loop->recursion() != nullptr, "{} ({}) cannot be called",
                  shown(budget_, target), type_name(target));
    const Budget::Level level(budget_);
    const Matched items = match("loop", "iterable", given);
    return budget_.text(recurse(*static_cast<const Statement*>(loop->recursion()), *items[0],
                                *static_cast<Activation*>(loop->home()), loop->depth0() + 1));
  }

  // ---- expressions

  // Evaluates the operands, then resets line_ to this expression's line for error messages.
  Value eval(const Expression& e, Activation& call) {
    const Budget::Level level(budget_);
    line_ = e.line;
    budget_.step();
    switch (e.kind) {
      case Kind::kLiteral:
        return e.value;
      case Kind::kName: {
        const Value& found = call.at(e.place);
        return found.is_undefined() && found.missing()->name == nullptr ? named_missing(e, found)
                                                                        : found;
      }
      case Kind::kTuple:
      case Kind::kList:
        return list(e, call);
      case Kind::kDict:
        return dict(e, call);
      case Kind::kAttribute:
        return attribute(e, call);
      case Kind::kItem:
        return item(e, call);
      case Kind::kSlice:
        return slice(e, call);
      case Kind::kCall:
        return this->call(e, call, nullptr);
      case Kind::kFilter:
      case Kind::kTest:
        return filter_or_test(e, call);
      case Kind::kNot:
        return Value::of(!truthy(eval(*e.parts[0], call)));
      case Kind::kNegative:
        return negated(budget_, eval(*e.parts[0], call));
      case Kind::kPositive:
        return positive(budget_, eval(*e.parts[0], call));
      case Kind::kBinary:
        return binary(e, call);
      case Kind::kAnd:
      case Kind::kOr: {
        Value left = eval(*e.parts[0], call);
        return truthy(left) == (e.kind == Kind::kAnd) ? eval(*e.parts[1], call) : left;
      }
      case Kind::kConcat:
        return concatenated(e, call);
      case Kind::kCompare:
        return compared(e, call);
      case Kind::kCondition:
        if (truthy(eval(*e.parts[1], call))) return eval(*e.parts[0], call);
        return e.parts[2] ? eval(*e.parts[2], call) : Value();
      case Kind::kField:
        break;
    }
    return {};
  }

  static Value named_missing(const Expression& e, const Value& found) {
    return Value(Value::Data(Undefined{&e.name, found.missing()->forbidden}));
  }

  Value list(const Expression& e, Activation& call) {
    std::vector<Value> items;
    items.reserve(e.parts.size());
    for (const ExpressionPtr& part : e.parts) items.push_back(eval(*part, call));
    return budget_.list(std::move(items),
                        e.kind == Kind::kTuple ? ListKind::kTuple : ListKind::kList);
  }

  Value dict(const Expression& e, Activation& call) {
    DictBuilder items;
    for (size_t i = 0; i < e.parts.size(); i += 2) {
      Value key = eval(*e.parts[i], call);
      TWELL_REQUIRE(can_be_key(key), "{} cannot be a key", shown(budget_, key));
      items.add(std::move(key), eval(*e.parts[i + 1], call));
    }
    return budget_.dict(std::move(items));
  }

  Value attribute(const Expression& e, Activation& call) {
    const Value object = eval(*e.parts[0], call);
    line_ = e.line;
    Value found = get_attribute(budget_, object, e.name);
    return found.is_undefined() ? named_missing(e, found) : found;
  }

  Value item(const Expression& e, Activation& call) {
    const Value object = eval(*e.parts[0], call);
    const Value key = eval(*e.parts[1], call);
    line_ = e.line;
    return get_item(budget_, object, key);
  }

  Value slice(const Expression& e, Activation& call) {
    const Value object = eval(*e.parts[0], call);
    const auto bound = [&](size_t i) {
      return e.parts[i] ? eval(*e.parts[i], call) : Value::none();
    };
    const Value from = bound(1), to = bound(2), step = bound(3);
    line_ = e.line;
    return get_slice(budget_, object, from, to, step);
  }

  Value filter_or_test(const Expression& e, Activation& call) {
    const Value value = e.parts[0] ? eval(*e.parts[0], call) : block_text_;
    const Arguments given = arguments(e, call);
    return e.kind == Kind::kFilter ? apply_filter(budget_, e.name, value, given)
                                   : Value::of(apply_test(budget_, e.name, value, given));
  }

  Value binary(const Expression& e, Activation& call) {
    const Value left = eval(*e.parts[0], call);
    const Value right = eval(*e.parts[1], call);
    line_ = e.line;
    return arithmetic(budget_, e.name, left, right);
  }

  Value concatenated(const Expression& e, Activation& call) {
    std::string out;
    for (const ExpressionPtr& part : e.parts) append_str(budget_, eval(*part, call), out);
    return budget_.text(std::move(out));
  }

  Value compared(const Expression& e, Activation& call) {
    Value left = eval(*e.parts[0], call);
    for (size_t i = 0; i < e.signs.size(); ++i) {
      Value right = eval(*e.parts[i + 1], call);
      line_ = e.line;
      if (!holds(e.signs[i], left, right)) return Value::of(false);
      left = std::move(right);
    }
    return Value::of(true);
  }

  bool holds(const std::string& sign, const Value& left, const Value& right) {
    if (sign == "==") return equal(budget_, left, right);
    if (sign == "!=") return !equal(budget_, left, right);
    if (sign == "in") return contains(budget_, left, right);
    if (sign == "not in") return !contains(budget_, left, right);
    return ordered(budget_, sign, left, right);
  }

  const Variables& variables_;
  Budget budget_;
  Heap heap_{budget_};
  Variables exported_;  // the template's own variables, which blocks see
  std::vector<std::unique_ptr<Activation>> calls_;
  Value block_text_;  // what the filter of a block is applied to
  std::string out_;
  int line_ = 1;
};

}  // namespace

std::string render(const Template& tree, const Variables& variables, const std::string& source,
                   const RenderLimits& limits) {
  Renderer renderer(variables, limits);
  try {
    return renderer.whole(tree);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: line {}: {}", source, renderer.line(), error.what()));
  }
}

}  // namespace twell::jinja
