// SPDX-License-Identifier: Apache-2.0
// The syntax tree of a chat template. Internal to data.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twell/chat_template/jinja_value.h"

namespace twell::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

enum class ExpressionKind {
  kLiteral,    // value
  kName,       // name
  kList,       // parts
  kDict,       // parts: key, value, key, value...
  kMember,     // parts[0] . name
  kIndex,      // parts[0] [ parts[1] ]
  kSlice,      // parts[0] [ parts[1] : parts[2] : parts[3] ], absent ones null
  kCall,       // parts[0] ( parts[1...], named )
  kFilter,     // parts[0] | name ( parts[1...], named )
  kTest,       // parts[0] is name ( parts[1...] )
  kNot,        // parts[0]
  kNegate,     // parts[0]
  kBinary,     // parts[0] name parts[1]
  kCondition,  // parts[0] if parts[1] else parts[2] (null: undefined)
};

struct Expression {
  ExpressionKind kind = ExpressionKind::kLiteral;
  int line = 1;
  std::string name;
  Value value;
  std::vector<ExpressionPtr> parts;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};

struct Statement;
using Body = std::vector<Statement>;

enum class StatementKind { kText, kOutput, kFor, kIf, kSet, kBreak, kContinue };

struct Statement {
  StatementKind kind = StatementKind::kText;
  int line = 1;
  std::string text;                // of kText
  std::vector<std::string> names;  // loop variables; what is set ("ns", "field" for a namespace's)
  ExpressionPtr expression;        // output, iterated, condition, value set (null: the body's text)
  ExpressionPtr filter;            // for ... if
  Body body;
  Body otherwise;  // else, elif
};

// InputError names the source, the line and what is not supported.
Body parse_template(std::string_view text, const std::string& source);

}  // namespace twell::jinja
