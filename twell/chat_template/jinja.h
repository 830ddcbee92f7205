// SPDX-License-Identifier: Apache-2.0
// The template language: values, syntax tree, parser and renderer. Internal to this folder.
//
// Templates come with downloaded models, so these are bounded: the depth of the syntax tree and of
// values, and the steps and bytes of rendering. InputError beyond a bound.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace twell::jinja {

constexpr int kMaxNesting = 100;  // of brackets and blocks: the parser recurses through them
constexpr int kMaxDepth = 500;  // of the syntax tree and of values: rendering recurses through them
constexpr int64_t kMaxSteps = 1'000'000;         // expressions and statements
constexpr size_t kMaxBytes = size_t{256} << 20;  // of texts and values, read and written

struct List;
struct Dict;
struct Namespace;

// An immutable value with Python's truth, text and order; copies share their content.
struct Value {
  struct None {
    bool operator==(const None&) const = default;
  };
  // monostate: undefined. The renderer owns namespaces, so they cannot form ownership cycles.
  std::variant<std::monostate, None, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, Namespace*>
      data;

  static Value none() { return {None{}}; }
  static Value of(bool value) { return {value}; }
  static Value of(int64_t value) { return {value}; }
  static Value of(double value) { return {value}; }
  static Value of(std::string text) {
    return {std::make_shared<const std::string>(std::move(text))};
  }
  static Value of(std::vector<Value> items);
  static Value of(std::vector<std::pair<std::string, Value>> items);

  bool undefined() const { return std::holds_alternative<std::monostate>(data); }
  bool is_none() const { return std::holds_alternative<None>(data); }
  // Null when the value has another type.
  const bool* boolean() const { return std::get_if<bool>(&data); }
  const int64_t* integer() const { return std::get_if<int64_t>(&data); }
  const double* real() const { return std::get_if<double>(&data); }
  const std::string* text() const { return content<std::string>(); }
  const List* list() const { return content<List>(); }
  const Dict* dict() const { return content<Dict>(); }
  Namespace* space() const {
    const auto* found = std::get_if<Namespace*>(&data);
    return found == nullptr ? nullptr : *found;
  }

 private:
  template <typename T>
  const T* content() const {
    const auto* found = std::get_if<std::shared_ptr<const T>>(&data);
    return found == nullptr ? nullptr : found->get();
  }
};

// depth: nesting of lists and dictionaries, 1 when none is inside.
struct List {
  std::vector<Value> items;
  int depth = 1;
};
struct Dict {
  std::vector<std::pair<std::string, Value>> items;  // insertion order, unique keys
  int depth = 1;
};
// namespace() of Jinja: mutable, so that an assignment inside a loop is visible outside.
struct Namespace {
  std::map<std::string, Value> fields;
};

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
  int depth = 1;  // of the tree rooted here
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
  std::vector<std::string> names;  // loop variables or set targets ("ns", "field" for ns.field)
  ExpressionPtr expression;        // of output, loop, condition or set (null: body's text)
  ExpressionPtr filter;            // condition of "for ... if"
  Body body;
  Body otherwise;  // of else and elif
};

// InputError names the source, the line and the unsupported syntax.
Body parse_template(std::string_view text, const std::string& source);

// Renders the template. InputError names the source, the line, and the unsupported filter, test,
// method or function, or gives the message that the template raised.
std::string render(const Body& body, const std::map<std::string, Value>& variables,
                   const std::string& source);

}  // namespace twell::jinja
