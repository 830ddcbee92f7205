// SPDX-License-Identifier: Apache-2.0
// Finds the place of every variable, by the rules of jinja2's idtracking: a scope's names that are
// assigned in it are its own and begin with the value of the same name outside; the others are
// those of the scopes around it, or, where none has it, come from what the template is given.
// It also refuses what jinja2 refuses to compile.
#include <algorithm>
#include <map>
#include <set>

#include "twell/base/error.h"
#include "twell/chat_template/jinja/filters.h"
#include "twell/chat_template/jinja/parser.h"

namespace twell::jinja {
namespace {

using Kind = ExpressionKind;

// A function of the compiled template: it owns slots.
struct FunctionSlots {
  explicit FunctionSlots(const FunctionSlots* outer_in) : outer(outer_in) {}
  int slot(int level, const std::string& name) {
    return slots.emplace(std::pair(level, name), static_cast<int>(slots.size())).first->second;
  }
  int count() const { return static_cast<int>(slots.size()); }
  // How many functions outwards `other` is.
  int hops_to(const FunctionSlots* other) const {
    int hops = 0;
    for (const FunctionSlots* at = this; at != other; at = at->outer) ++hops;
    return hops;
  }

  const FunctionSlots* outer;
  std::map<std::pair<int, std::string>, int> slots;
};

// The names of a scope, or what a branch of an if adds to those of its scope.
class Symbols {
 public:
  Symbols(const Symbols* parent, FunctionSlots& function)
      : parent_(parent), function_(&function), level_(parent == nullptr ? 0 : parent->level_ + 1) {}
  struct BranchOf {
    const Symbols& scope;
  };
  explicit Symbols(BranchOf branch)
      : parent_(branch.scope.parent_),
        base_(&branch.scope),
        function_(branch.scope.function_),
        level_(branch.scope.level_) {}

  struct Found {
    const FunctionSlots* function = nullptr;  // null: not found
    int slot = -1;
  };
  Found find(const std::string& name) const {
    const Found own = find_own(name);
    return own.function != nullptr || parent_ == nullptr ? own : parent_->find(name);
  }

  void store(const std::string& name) {
    stores_.insert(name);
    if (find_own(name).function != nullptr) return;
    const Found outer = parent_ == nullptr ? Found{} : parent_->find(name);
    define(name, outer.function != nullptr ? outer_load(outer) : Load{});
  }
  int declare_parameter(const std::string& name) {
    stores_.insert(name);
    return define(name, {.kind = Load::Kind::kParameter});
  }
  void load(const std::string& name) {
    if (find(name).function == nullptr) define(name, context_load(name));
  }

  // Joins the branches of an if. A name that is assigned in branches only has the value it has
  // outside where none of them is taken.
  void join(const std::vector<Symbols>& branches) {
    std::set<std::string> stores;
    for (const Symbols& branch : branches) {
      for (const std::string& name : branch.stores_) {
        if (!stored(name)) stores.insert(name);
      }
    }
    for (const Symbols& branch : branches) {
      for (const auto& [name, slot] : branch.refs_) refs_[name] = slot;
      for (const auto& [slot, load] : branch.loads_) loads_[slot] = load;
      stores_.insert(branch.stores_.begin(), branch.stores_.end());
    }
    for (const std::string& name : stores) {
      const Found outer = parent_ == nullptr ? Found{} : parent_->find(name);
      loads_[find(name).slot] = outer.function != nullptr ? outer_load(outer) : context_load(name);
    }
  }

  Scope scope() const { return {{loads_.begin(), loads_.end()}}; }
  FunctionSlots& function() const { return *function_; }

 private:
  Found find_own(const std::string& name) const {
    for (const Symbols* at = this; at != nullptr; at = at->base_) {
      const auto found = at->refs_.find(name);
      if (found != at->refs_.end()) return {function_, found->second};
    }
    return {};
  }
  bool stored(const std::string& name) const {
    for (const Symbols* at = this; at != nullptr; at = at->base_) {
      if (at->stores_.contains(name)) return true;
    }
    return false;
  }
  int define(const std::string& name, Load load) {
    const int slot = function_->slot(level_, name);
    refs_[name] = slot;
    loads_[slot] = std::move(load);
    return slot;
  }
  Load outer_load(const Found& outer) const {
    return {.kind = Load::Kind::kOuter, .outer = {function_->hops_to(outer.function), outer.slot}};
  }
  static Load context_load(const std::string& name) {
    return {.kind = Load::Kind::kContext, .name = name};
  }

  const Symbols* parent_;
  const Symbols* base_ = nullptr;  // of a branch: its scope so far
  FunctionSlots* function_;
  int level_;
  std::map<std::string, int> refs_;  // slots
  std::map<int, Load> loads_;
  std::set<std::string> stores_;
};

// ---- which of some special names a part uses before it assigns them

class Uses {
 public:
  explicit Uses(std::set<std::string> names) : names_(std::move(names)) {}
  bool of(const std::string& name) const { return used_.contains(name); }

  void visit(const Expression* e) {
    if (e == nullptr) return;
    if (e->kind == Kind::kName || e->kind == Kind::kField) see(e->name, true);
    for (const ExpressionPtr& part : e->parts) visit(part.get());
    for (const auto& [name, part] : e->named) visit(part.get());
    visit(e->star.get());
    visit(e->double_star.get());
  }
  void visit(const Body& body) {
    for (const Statement& s : body) visit(s);
  }

 private:
  void see(const std::string& name, bool load) {
    if (!names_.contains(name)) return;
    if (load) {
      used_.insert(name);
    } else if (!used_.contains(name)) {
      names_.erase(name);
    }
  }
  void visit_target(const Expression* e) {
    if (e == nullptr) return;
    if (e->kind == Kind::kName) see(e->name, false);
    for (const ExpressionPtr& part : e->parts) visit_target(part.get());
  }
  void visit(const Statement& s) {
    if (s.kind == StatementKind::kBlock) return;
    if (s.kind == StatementKind::kMacro) {
      visit_parameters(s.signature);
      return visit(s.body);
    }
    visit_target(s.target.get());
    for (const ExpressionPtr& target : s.targets) visit_target(target.get());
    visit(s.expression.get());
    for (const ExpressionPtr& e : s.expressions) visit(e.get());
    if (s.kind == StatementKind::kCallBlock) visit_parameters(s.signature);
    visit(s.body);
    visit(s.elifs);
    visit(s.otherwise);
    visit(s.condition.get());
  }
  void visit_parameters(const Signature& signature) {
    for (const Parameter& p : signature.parameters) see(p.name, false);
    for (const Parameter& p : signature.parameters) visit(p.fallback.get());
  }

  std::set<std::string> names_;
  std::set<std::string> used_;
};

bool uses_loop(const Statement& loop) {
  Uses in_body({"loop"}), in_condition({"loop"});
  in_body.visit(loop.body);
  in_condition.visit(loop.condition.get());
  return loop.recursive || in_body.of("loop") || in_condition.of("loop");
}

// ---- what a scope's own statements do to its names; they do not look into inner scopes

void see_expression(Symbols& symbols, const Expression* e) {
  if (e == nullptr) return;
  if (e->kind == Kind::kName) symbols.load(e->name);
  for (const ExpressionPtr& part : e->parts) see_expression(symbols, part.get());
  for (const auto& [name, part] : e->named) see_expression(symbols, part.get());
  see_expression(symbols, e->star.get());
  see_expression(symbols, e->double_star.get());
}

void see_target(Symbols& symbols, const Expression* e, bool parameter) {
  if (e->kind == Kind::kField) return symbols.load(e->name);
  if (e->kind == Kind::kName) {
    parameter ? static_cast<void>(symbols.declare_parameter(e->name)) : symbols.store(e->name);
  }
  for (const ExpressionPtr& part : e->parts) see_target(symbols, part.get(), parameter);
}

void see_body(Symbols& symbols, const Body& body);

void see_if(Symbols& symbols, const Statement& s) {
  see_expression(symbols, s.expression.get());
  std::vector<Symbols> branches(3, Symbols(Symbols::BranchOf{symbols}));
  see_body(branches[0], s.body);
  see_body(branches[1], s.elifs);
  see_body(branches[2], s.otherwise);
  symbols.join(branches);
}

void see_statement(Symbols& symbols, const Statement& s) {
  switch (s.kind) {
    case StatementKind::kIf:
      return see_if(symbols, s);
    case StatementKind::kMacro:
      return symbols.store(s.text);
    case StatementKind::kSetBlock:
      return see_target(symbols, s.target.get(), false);
    case StatementKind::kSet:
      see_expression(symbols, s.expression.get());
      return see_target(symbols, s.target.get(), false);
    case StatementKind::kBlock:
      return;
    default:  // of a loop and a block with a filter or a call, what stands in the tag
      see_expression(symbols, s.expression.get());
      for (const ExpressionPtr& e : s.expressions) see_expression(symbols, e.get());
  }
}

void see_body(Symbols& symbols, const Body& body) {
  for (const Statement& s : body) see_statement(symbols, s);
}

ExpressionPtr copy_target(const Expression& e) {
  auto out = std::make_unique<Expression>();
  out->kind = e.kind;
  out->line = e.line;
  out->name = e.name;
  for (const ExpressionPtr& part : e.parts) out->parts.push_back(copy_target(*part));
  return out;
}

// ---- the pass over the tree

class Resolver {
 public:
  explicit Resolver(const std::string& source) : source_(source) {}

  void run(Template& tree) {
    FunctionSlots function(nullptr);
    Symbols symbols(nullptr, function);
    see_body(symbols, tree.body);
    const Frame frame{.symbols = symbols, .top = true};
    place(tree.body, frame);
    tree.scope = symbols.scope();
    tree.slots = function.count();
  }

 private:
  struct Frame {
    const Symbols& symbols;
    bool top = false;   // assignments are the template's own variables
    bool soft = false;  // inside a condition, where unknown filters are errors only when met
    int loops = 0;      // that a break can leave
  };

  [[noreturn]] void fail(int line, const std::string& message) const {
    throw InputError(fmt::format("{}: line {}: {}", source_, line, message));
  }

  static Place place_of(const std::string& name, const Frame& frame) {
    const Symbols::Found found = frame.symbols.find(name);
    TWELL_CHECK(found.function != nullptr, "the variable {} has no place", name);
    return {frame.symbols.function().hops_to(found.function), found.slot};
  }

  void place(Expression* e, const Frame& frame) {
    if (e == nullptr) return;
    if (e->kind == Kind::kName || e->kind == Kind::kField) e->place = place_of(e->name, frame);
    if (e->kind == Kind::kFilter && !frame.soft && !is_filter(e->name)) {
      fail(e->line, fmt::format("there is no filter named '{}'", e->name));
    }
    if (e->kind == Kind::kTest && !frame.soft && !is_test(e->name)) {
      fail(e->line, fmt::format("there is no test named '{}'", e->name));
    }
    Frame inner = frame;
    inner.soft = frame.soft || e->kind == Kind::kCondition;
    for (const ExpressionPtr& part : e->parts) place(part.get(), inner);
    for (const auto& [name, part] : e->named) place(part.get(), inner);
    place(e->star.get(), inner);
    place(e->double_star.get(), inner);
  }

  void place_target(Expression* e, const Frame& frame) {
    if (e->kind == Kind::kName && e->name == "loop" && for_depth_ > 0) {
      fail(e->line, "the variable 'loop' of a loop cannot be assigned");
    }
    if (e->kind == Kind::kName || e->kind == Kind::kField) e->place = place_of(e->name, frame);
    e->exported = frame.top && e->kind == Kind::kName;
    for (const ExpressionPtr& part : e->parts) place_target(part.get(), frame);
  }

  void place(Body& body, const Frame& frame) {
    for (Statement& s : body) place(s, frame);
  }

  void place(Statement& s, const Frame& frame) {
    switch (s.kind) {
      case StatementKind::kText:
      case StatementKind::kUnsupported:
        return;
      case StatementKind::kBreak:
      case StatementKind::kContinue:
        if (frame.loops == 0) fail(s.line, "a break or continue outside of a loop");
        return;
      case StatementKind::kOutput:
        for (const ExpressionPtr& e : s.expressions) place(e.get(), frame);
        return;
      case StatementKind::kFor:
        return place_for(s, frame);
      case StatementKind::kIf:
        return place_if(s, frame);
      case StatementKind::kSet:
        place(s.expression.get(), frame);
        return place_target(s.target.get(), frame);
      case StatementKind::kMacro:
        place_target(s.target.get(), frame);
        return place_function(s, frame);
      case StatementKind::kCallBlock:
        place(s.expression.get(), frame);
        return place_function(s, frame);
      case StatementKind::kBlock:
        return place_block(s);
      case StatementKind::kSetBlock:
      case StatementKind::kFilterBlock:
      case StatementKind::kWith:
        return place_scope(s, frame);
    }
  }

  void place_if(Statement& s, const Frame& frame) {
    Frame soft = frame;
    soft.soft = true;
    place(s.expression.get(), soft);
    place(s.body, soft);
    for (Statement& branch : s.elifs) {
      place(branch.expression.get(), soft);
      place(branch.body, soft);
    }
    place(s.otherwise, soft);
  }

  void place_for(Statement& s, const Frame& frame) {
    place(s.expression.get(), frame);
    FunctionSlots own(&frame.symbols.function());
    FunctionSlots& function = s.recursive ? own : frame.symbols.function();
    Symbols symbols(&frame.symbols, function), other(&frame.symbols, function);
    if (uses_loop(s)) s.loop_slot = symbols.declare_parameter("loop");
    see_target(symbols, s.target.get(), true);
    see_body(symbols, s.body);
    see_body(other, s.otherwise);
    if (s.condition != nullptr) place_condition(s, frame);
    ++for_depth_;
    const int loops = s.recursive ? 0 : frame.loops;
    const Frame body_frame{.symbols = symbols, .loops = loops + 1};
    place_target(s.target.get(), body_frame);
    place(s.body, body_frame);
    place(s.otherwise, Frame{.symbols = other, .loops = loops});
    --for_depth_;
    s.scope = symbols.scope();
    s.other_scope = other.scope();
    s.slots = s.recursive ? own.count() : 0;
  }

  void place_condition(Statement& s, const Frame& frame) {
    FunctionSlots function(&frame.symbols.function());
    Symbols symbols(&frame.symbols, function);
    s.condition_target = copy_target(*s.target);
    see_target(symbols, s.target.get(), true);
    see_expression(symbols, s.condition.get());
    const Frame inner{symbols};
    place_target(s.condition_target.get(), inner);
    place(s.condition.get(), inner);
    s.condition_scope = symbols.scope();
    s.condition_slots = function.count();
  }

  void place_function(Statement& s, const Frame& frame) {
    FunctionSlots function(&frame.symbols.function());
    Symbols symbols(&frame.symbols, function);
    Signature& signature = s.signature;
    Uses uses({"caller", "kwargs", "varargs"});
    uses.visit(s.body);
    std::set<std::string> names;
    for (Parameter& p : signature.parameters) {
      p.slot = symbols.declare_parameter(p.name);
      names.insert(p.name);
      if (p.name == "caller") signature.explicit_caller = true;
      if (p.name == "caller" && uses.of("caller") && p.fallback == nullptr) {
        fail(s.line, "a macro's parameter 'caller' needs a default");
      }
    }
    for (const Parameter& p : signature.parameters) see_expression(symbols, p.fallback.get());
    see_body(symbols, s.body);
    const auto special = [&](const char* name) {
      return uses.of(name) && !names.contains(name) ? symbols.declare_parameter(name) : -1;
    };
    signature.caller = special("caller");
    signature.keywords = special("kwargs");
    signature.rest = special("varargs");
    const Frame inner{symbols};
    for (const Parameter& p : signature.parameters) place(p.fallback.get(), inner);
    place(s.body, inner);
    s.scope = symbols.scope();
    s.slots = function.count();
  }

  void place_block(Statement& s) {
    FunctionSlots function(nullptr);
    Symbols symbols(nullptr, function);
    see_body(symbols, s.body);
    place(s.body, Frame{symbols});
    s.scope = symbols.scope();
    s.slots = function.count();
  }

  void place_scope(Statement& s, const Frame& frame) {
    Symbols symbols(&frame.symbols, frame.symbols.function());
    const Frame inner{.symbols = symbols, .loops = frame.loops};
    if (s.kind == StatementKind::kWith) {
      for (const ExpressionPtr& e : s.expressions) place(e.get(), frame);
      for (const ExpressionPtr& target : s.targets) see_target(symbols, target.get(), true);
      see_body(symbols, s.body);
      for (const ExpressionPtr& target : s.targets) place_target(target.get(), inner);
    } else {
      see_expression(symbols, s.expression.get());
      see_body(symbols, s.body);
      place(s.expression.get(), inner);
      if (s.kind == StatementKind::kSetBlock) place_target(s.target.get(), frame);
    }
    place(s.body, inner);
    s.scope = symbols.scope();
  }

  const std::string& source_;
  int for_depth_ = 0;
};

}  // namespace

void resolve_variables(Template& tree, const std::string& source) { Resolver(source).run(tree); }

}  // namespace twell::jinja
