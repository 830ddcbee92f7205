// SPDX-License-Identifier: Apache-2.0
// The syntax tree of a template, with the place of each variable.
//
// As jinja2 compiles a template to Python functions, the template, each macro, call block, block,
// recursive loop and loop condition is a function with variables of its own, and sees those of the
// functions around it. A variable is a slot of its function's call.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "twell/chat_template/jinja/value.h"

namespace twell::jinja {

constexpr int kMaxNesting = 100;  // of brackets and blocks: the parser recurses through them

struct Place {
  int hops = 0;  // functions outwards
  int slot = -1;
};

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

enum class ExpressionKind {
  kLiteral,    // value
  kName,       // name, place
  kField,      // name.field of a namespace, as a target; the field is in `text`
  kTuple,      // parts
  kList,       // parts
  kDict,       // parts: key, value, key, value...
  kAttribute,  // parts[0] . name
  kItem,       // parts[0] [ parts[1] ]
  kSlice,      // parts[0] [ parts[1] : parts[2] : parts[3] ], absent ones null
  kCall,       // parts[0] ( parts[1...], named, star, double_star )
  kFilter,     // parts[0] | name ( parts[1...], ... ); parts[0] null: a block's text
  kTest,       // parts[0] is name ( parts[1...], ... )
  kNot,        // parts[0]
  kNegative,   // parts[0]
  kPositive,   // parts[0]
  kBinary,     // parts[0] name parts[1]
  kAnd,        // parts[0], parts[1]
  kOr,         // parts[0], parts[1]
  kConcat,     // parts
  kCompare,    // parts[0] signs[0] parts[1] signs[1] parts[2]...
  kCondition,  // parts[0] if parts[1] else parts[2] (null: undefined)
};

struct Expression {
  ExpressionKind kind = ExpressionKind::kLiteral;
  int line = 1;
  int depth = 1;  // of the tree rooted here
  std::string name;
  std::string text;
  Value value;
  Place place;
  bool exported = false;  // a target of the template itself, which blocks see
  std::vector<ExpressionPtr> parts;
  std::vector<std::string> signs;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
  ExpressionPtr star, double_star;
};

// What a variable holds when its scope is entered.
struct Load {
  enum class Kind { kUndefined, kParameter, kOuter, kContext };
  Kind kind = Kind::kUndefined;
  Place outer;       // of kOuter: the variable of that name outside
  std::string name;  // of kContext: a variable given to the template, or a function
};
struct Scope {
  std::vector<std::pair<int, Load>> loads;  // by slot
};

struct Parameter {
  std::string name;
  int line = 1;
  int slot = -1;
  ExpressionPtr fallback;  // null: none
};

// A macro, or the body of a call block. Slots are -1 where the body does not use the variable.
struct Signature {
  std::vector<Parameter> parameters;
  bool explicit_caller = false;  // a parameter named caller
  int caller = -1, keywords = -1, rest = -1;
};

struct Statement;
using Body = std::vector<Statement>;

enum class StatementKind {
  kText,         // text
  kOutput,       // expressions
  kFor,          // for target in expression if condition: body, otherwise
  kIf,           // if expression: body, elifs (each a kIf), otherwise
  kSet,          // target = expression
  kSetBlock,     // target = body's text, through expression (a filter) if there is one
  kWith,         // targets = expressions: body
  kMacro,        // text (name), signature, body, target
  kCallBlock,    // expression (a call), signature, body; null: the body alone (generation)
  kFilterBlock,  // expression (a filter), body
  kBlock,        // body
  kBreak,
  kContinue,
  kUnsupported,  // text names it; an error when it is met
};

struct Statement {
  StatementKind kind = StatementKind::kText;
  int line = 1;
  std::string text;
  ExpressionPtr target, expression, condition;
  std::vector<ExpressionPtr> targets, expressions;
  Signature signature;
  Body body, elifs, otherwise;

  Scope scope;        // of the body
  Scope other_scope;  // of a loop's otherwise
  int slots = 0;      // of the function that the body is, where it is one
  bool recursive = false;
  int loop_slot = -1;  // of the variable `loop`; -1: the body does not use it

  // A loop's condition is a function; it has its own copy of the target.
  Scope condition_scope;
  int condition_slots = 0;
  ExpressionPtr condition_target;
};

struct Template {
  Body body;
  Scope scope;
  int slots = 0;
};

}  // namespace twell::jinja
