// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/parser.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/chat_template/jinja/lexer.h"

namespace twell::jinja {
namespace {

using Kind = ExpressionKind;
using Words = std::vector<std::string_view>;

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& source)
      : tokens_(std::move(tokens)), source_(source) {}

  Body whole() {
    Body body = statements({});
    return body;
  }

 private:
  // ---- tokens
  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(fmt::format("{}: line {}: {}", source_, peek().line, message));
  }
  const Token& peek(size_t ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  bool is_sign(std::string_view text, size_t ahead = 0) const {
    return peek(ahead).kind == TokenKind::kSign && peek(ahead).text == text;
  }
  bool is_word(std::string_view text, size_t ahead = 0) const {
    return peek(ahead).kind == TokenKind::kName && peek(ahead).text == text;
  }
  bool take_sign(std::string_view text) { return is_sign(text) && (++at_, true); }
  bool take_word(std::string_view text) { return is_word(text) && (++at_, true); }
  std::string found() const {
    switch (peek().kind) {
      case TokenKind::kEndOutput:
        return "'}}'";
      case TokenKind::kEndBlock:
        return "'%}'";
      case TokenKind::kEnd:
        return "the end";
      case TokenKind::kString:
        return "a text";
      case TokenKind::kReal:
        return "a number";
      default:
        return "'" + peek().text + "'";
    }
  }
  void want_sign(std::string_view text) {
    if (!take_sign(text)) fail(fmt::format("expected '{}', found {}", text, found()));
  }
  void want_word(std::string_view text) {
    if (!take_word(text)) fail(fmt::format("expected '{}', found {}", text, found()));
  }
  void want_end(TokenKind kind) {
    if (peek().kind != kind) fail(fmt::format("{} is not expected", found()));
    ++at_;
  }
  std::string want_name() {
    if (peek().kind != TokenKind::kName) fail(fmt::format("expected a name, found {}", found()));
    return tokens_[at_++].text;
  }

  class Deeper {
   public:
    explicit Deeper(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kMaxNesting) parser_.fail("nested too deeply");
    }
    ~Deeper() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  // ---- statements
  // Parses up to a block that begins with one of `ends`, which the caller consumes.
  Body statements(const Words& ends) {
    const Deeper deeper(*this);
    Body body;
    while (peek().kind != TokenKind::kEnd) {
      const int line = peek().line;
      if (peek().kind == TokenKind::kText) {
        body.push_back({.kind = StatementKind::kText, .line = line, .text = tokens_[at_++].text});
      } else if (peek().kind == TokenKind::kBeginOutput) {
        ++at_;
        Statement out{.kind = StatementKind::kOutput, .line = line};
        out.expressions.push_back(tuple());
        want_end(TokenKind::kEndOutput);
        body.push_back(std::move(out));
      } else {
        if (peek(1).kind == TokenKind::kName &&
            std::find(ends.begin(), ends.end(), peek(1).text) != ends.end()) {
          return body;
        }
        ++at_;
        Statement out{.line = line};
        block(out);
        want_end(TokenKind::kEndBlock);
        body.push_back(std::move(out));
      }
    }
    if (!ends.empty()) fail(fmt::format("'{}' is missing", ends.back()));
    return body;
  }

  // The body of a block whose tag ends here, up to one of `ends`, whose word is returned.
  std::string block_body(Body& body, const Words& ends) {
    take_sign(":");
    want_end(TokenKind::kEndBlock);
    body = statements(ends);
    ++at_;
    return want_name();
  }

  void block(Statement& out) {
    const std::string word = want_name();
    if (word == "for") return for_block(out);
    if (word == "if") return if_block(out);
    if (word == "set") return set_block(out);
    if (word == "macro") return macro_block(out);
    if (word == "call") return call_block(out);
    if (word == "filter") return filter_block(out);
    if (word == "with") return with_block(out);
    if (word == "block") return named_block(out);
    if (word == "print") return print(out);
    if (word == "break" || word == "continue") {
      out.kind = word == "break" ? StatementKind::kBreak : StatementKind::kContinue;
    } else if (word == "generation") {  // marks the assistant's text; it prints its body
      out.kind = StatementKind::kCallBlock;
      block_body(out.body, {"endgeneration"});
    } else if (word == "include" || word == "import" || word == "from" || word == "extends" ||
               word == "autoescape") {
      unsupported(out, word);
    } else {
      fail(fmt::format("there is no statement '{}'", word));
    }
  }

  // Other templates cannot be reached, so these are errors where they are met, as in jinja2.
  void unsupported(Statement& out, const std::string& word) {
    out.kind = StatementKind::kUnsupported;
    out.text = word;
    while (peek().kind != TokenKind::kEndBlock && peek().kind != TokenKind::kEnd) ++at_;
    if (word == "autoescape") block_body(out.body, {"endautoescape"});
  }

  void for_block(Statement& out) {
    out.kind = StatementKind::kFor;
    out.target = target({"in"}, false);
    want_word("in");
    out.expression = tuple({.conditions = false, .end = "recursive"});
    if (take_word("if")) out.condition = expression();
    out.recursive = take_word("recursive");
    if (block_body(out.body, {"endfor", "else"}) == "else") {
      block_body(out.otherwise, {"endfor"});
    }
  }

  void if_block(Statement& out) {
    out.kind = StatementKind::kIf;
    Statement* branch = &out;
    while (true) {
      branch->kind = StatementKind::kIf;
      branch->expression = tuple({.conditions = false});
      const std::string word = block_body(branch->body, {"elif", "else", "endif"});
      if (word == "else") block_body(out.otherwise, {"endif"});
      if (word != "elif") return;
      branch = &out.elifs.emplace_back();
      branch->line = peek().line;
    }
  }

  void set_block(Statement& out) {
    out.target = target({}, true);
    if (take_sign("=")) {
      out.kind = StatementKind::kSet;
      out.expression = tuple();
      return;
    }
    out.kind = StatementKind::kSetBlock;
    if (is_sign("|")) out.expression = filters(nullptr);
    block_body(out.body, {"endset"});
  }

  void with_block(Statement& out) {
    out.kind = StatementKind::kWith;
    while (peek().kind != TokenKind::kEndBlock) {
      if (!out.targets.empty()) want_sign(",");
      out.targets.push_back(target({}, false));
      want_sign("=");
      out.expressions.push_back(expression());
    }
    block_body(out.body, {"endwith"});
  }

  void named_block(Statement& out) {
    out.kind = StatementKind::kBlock;
    out.text = want_name();
    if (std::find(block_names_.begin(), block_names_.end(), out.text) != block_names_.end()) {
      fail(fmt::format("the block '{}' is defined twice", out.text));
    }
    block_names_.push_back(out.text);
    if (is_word("scoped") || is_word("required")) {
      fail(fmt::format("'{}' of a block is not supported", peek().text));
    }
    block_body(out.body, {"endblock"});
    take_word(out.text);
  }

  void print(Statement& out) {
    out.kind = StatementKind::kOutput;
    while (peek().kind != TokenKind::kEndBlock) {
      if (!out.expressions.empty()) want_sign(",");
      out.expressions.push_back(expression());
    }
  }

  void macro_block(Statement& out) {
    out.kind = StatementKind::kMacro;
    out.text = name_target(out.target);
    signature(out.signature);
    block_body(out.body, {"endmacro"});
  }

  void call_block(Statement& out) {
    out.kind = StatementKind::kCallBlock;
    if (is_sign("(")) signature(out.signature);
    out.expression = expression();
    if (out.expression->kind != Kind::kCall) fail("expected a call");
    block_body(out.body, {"endcall"});
  }

  void filter_block(Statement& out) {
    out.kind = StatementKind::kFilterBlock;
    out.expression = filters(one_filter(nullptr));
    block_body(out.body, {"endfilter"});
  }

  std::string name_target(ExpressionPtr& target) {
    const std::string name = want_name();
    if (is_constant(name)) fail(fmt::format("{} cannot be assigned", name));
    target = make(Kind::kName, name);
    return name;
  }

  void signature(Signature& out) {
    want_sign("(");
    while (!is_sign(")")) {
      if (!out.parameters.empty()) want_sign(",");
      Parameter parameter{.line = peek().line};
      ExpressionPtr target;
      parameter.name = name_target(target);
      for (const Parameter& other : out.parameters) {
        if (other.name == parameter.name) {
          fail(fmt::format("the parameter '{}' is named twice", parameter.name));
        }
      }
      if (take_sign("=")) {
        parameter.fallback = expression();
      } else if (!out.parameters.empty() && out.parameters.back().fallback != nullptr) {
        fail("a parameter without a default follows one with a default");
      }
      out.parameters.push_back(std::move(parameter));
    }
    want_sign(")");
  }

  // ---- targets of assignments
  static bool is_constant(std::string_view name) {
    return name == "true" || name == "True" || name == "false" || name == "False" ||
           name == "none" || name == "None";
  }

  ExpressionPtr target(const Words& ends, bool fields) {
    const auto ended = [&] {
      return peek().kind == TokenKind::kEndBlock || is_sign(")") ||
             (peek().kind == TokenKind::kName &&
              std::find(ends.begin(), ends.end(), peek().text) != ends.end());
    };
    ExpressionPtr out = make(Kind::kTuple);
    bool is_tuple = false;
    while (!ended()) {
      add(*out, one_target(fields));
      if (!take_sign(",")) break;
      is_tuple = true;
    }
    if (out->parts.empty()) fail(fmt::format("expected a name, found {}", found()));
    return is_tuple ? std::move(out) : std::move(out->parts[0]);
  }

  ExpressionPtr one_target(bool fields) {
    const Deeper deeper(*this);
    if (take_sign("(")) {
      ExpressionPtr out = target({}, fields);
      want_sign(")");
      return out;
    }
    ExpressionPtr out;
    const std::string name = name_target(out);
    if (fields && take_sign(".")) {
      out->kind = Kind::kField;
      out->text = want_name();
    }
    return out;
  }

  // ---- expressions, from lowest to highest precedence
  ExpressionPtr make(Kind kind, std::string name = "") {
    auto out = std::make_unique<Expression>();
    out->kind = kind;
    out->line = peek().line;
    out->name = std::move(name);
    return out;
  }
  // Appends a part (null: absent) and checks the depth of the tree.
  void add(Expression& out, ExpressionPtr part) {
    if (part) require_depth(out, *part);
    out.parts.push_back(std::move(part));
  }
  void require_depth(Expression& out, const Expression& part) {
    out.depth = std::max(out.depth, part.depth + 1);
    if (out.depth > kMaxDepth) fail("an expression of too many terms");
  }
  ExpressionPtr unary_of(Kind kind, ExpressionPtr part) {
    ExpressionPtr out = make(kind);
    add(*out, std::move(part));
    return out;
  }
  ExpressionPtr binary(Kind kind, std::string name, ExpressionPtr left, ExpressionPtr right) {
    ExpressionPtr out = make(kind, std::move(name));
    add(*out, std::move(left));
    add(*out, std::move(right));
    return out;
  }

  struct TupleOptions {
    bool conditions = true;     // "a if b else c" is part of it
    std::string_view end = {};  // a word that ends it
    bool may_be_empty = false;
  };
  // An expression, or several with commas: a tuple.
  ExpressionPtr tuple(const TupleOptions& options) {
    const auto ended = [&] {
      return peek().kind == TokenKind::kEndOutput || peek().kind == TokenKind::kEndBlock ||
             is_sign(")") || (!options.end.empty() && is_word(options.end));
    };
    ExpressionPtr out = make(Kind::kTuple);
    bool is_tuple = false;
    while (!ended()) {
      add(*out, options.conditions ? expression() : either());
      if (!take_sign(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && !out->parts.empty()) return std::move(out->parts[0]);
    if (!is_tuple && !options.may_be_empty) {
      fail(fmt::format("expected an expression, found {}", found()));
    }
    return out;
  }
  ExpressionPtr tuple() { return tuple(TupleOptions{}); }

  ExpressionPtr expression() {
    const Deeper deeper(*this);
    ExpressionPtr value = either();
    while (take_word("if")) {
      ExpressionPtr out = make(Kind::kCondition);
      add(*out, std::move(value));
      add(*out, either());
      add(*out, take_word("else") ? expression() : nullptr);
      value = std::move(out);
    }
    return value;
  }
  ExpressionPtr either() {
    ExpressionPtr value = both();
    while (take_word("or")) value = binary(Kind::kOr, "", std::move(value), both());
    return value;
  }
  ExpressionPtr both() {
    ExpressionPtr value = negation();
    while (take_word("and")) value = binary(Kind::kAnd, "", std::move(value), negation());
    return value;
  }
  ExpressionPtr negation() {
    const Deeper deeper(*this);
    return take_word("not") ? unary_of(Kind::kNot, negation()) : comparison();
  }
  // Takes the comparison that begins here; empty when none does.
  std::string take_comparison() {
    for (const char* sign : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (take_sign(sign)) return sign;
    }
    if (take_word("in")) return "in";
    if (is_word("not") && is_word("in", 1)) return at_ += 2, "not in";
    return {};
  }
  ExpressionPtr comparison() {
    ExpressionPtr value = sum();
    std::string sign = take_comparison();
    if (sign.empty()) return value;
    ExpressionPtr out = make(Kind::kCompare);
    add(*out, std::move(value));
    for (; !sign.empty(); sign = take_comparison()) {
      out->signs.push_back(sign);
      add(*out, sum());
    }
    return out;
  }
  ExpressionPtr sum() {
    ExpressionPtr value = concatenation();
    while (is_sign("+") || is_sign("-")) {
      const std::string sign = tokens_[at_++].text;
      value = binary(Kind::kBinary, sign, std::move(value), concatenation());
    }
    return value;
  }
  ExpressionPtr concatenation() {
    ExpressionPtr value = product();
    if (!is_sign("~")) return value;
    ExpressionPtr out = unary_of(Kind::kConcat, std::move(value));
    while (take_sign("~")) add(*out, product());
    return out;
  }
  ExpressionPtr product() {
    ExpressionPtr value = power();
    while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
      const std::string sign = tokens_[at_++].text;
      value = binary(Kind::kBinary, sign, std::move(value), power());
    }
    return value;
  }
  ExpressionPtr power() {
    ExpressionPtr value = unary(true);
    while (take_sign("**")) value = binary(Kind::kBinary, "**", std::move(value), unary(true));
    return value;
  }
  ExpressionPtr unary(bool with_filters) {
    const Deeper deeper(*this);
    ExpressionPtr value;
    if (take_sign("-")) {
      value = unary_of(Kind::kNegative, unary(false));
    } else if (take_sign("+")) {
      value = unary_of(Kind::kPositive, unary(false));
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    return with_filters ? filtered(std::move(value)) : std::move(value);
  }

  // Filters, tests and calls of their results.
  ExpressionPtr filtered(ExpressionPtr value) {
    while (true) {
      if (is_sign("|")) {
        value = filters(std::move(value));
      } else if (is_word("is")) {
        value = test(std::move(value));
      } else if (is_sign("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr filters(ExpressionPtr value) {
    while (take_sign("|")) value = one_filter(std::move(value));
    return value;
  }
  std::string dotted_name() {
    std::string name = want_name();
    while (take_sign(".")) name += "." + want_name();
    return name;
  }
  ExpressionPtr one_filter(ExpressionPtr value) {
    ExpressionPtr out = make(Kind::kFilter, dotted_name());
    add(*out, std::move(value));
    if (is_sign("(")) arguments(*out);
    return out;
  }

  ExpressionPtr test(ExpressionPtr value) {
    ++at_;
    const bool negated = take_word("not");
    ExpressionPtr out = make(Kind::kTest, dotted_name());
    add(*out, std::move(value));
    const TokenKind kind = peek().kind;
    if (is_sign("(")) {
      arguments(*out);
    } else if (kind == TokenKind::kString || kind == TokenKind::kInteger ||
               kind == TokenKind::kReal || is_sign("[") || is_sign("{") ||
               (kind == TokenKind::kName && !is_word("else") && !is_word("or") &&
                !is_word("and"))) {
      if (is_word("is")) fail("tests with 'is' cannot be chained");
      add(*out, postfix(primary()));
    }
    return negated ? unary_of(Kind::kNot, std::move(out)) : std::move(out);
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    while (true) {
      if (take_sign(".")) {
        value = attribute(std::move(value));
      } else if (take_sign("[")) {
        value = subscript(std::move(value));
      } else if (is_sign("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr attribute(ExpressionPtr value) {
    if (peek().kind == TokenKind::kInteger) {
      ExpressionPtr out = make(Kind::kItem);
      add(*out, std::move(value));
      add(*out, literal(tokens_[at_++].number));
      return out;
    }
    ExpressionPtr out = make(Kind::kAttribute, want_name());
    add(*out, std::move(value));
    return out;
  }

  ExpressionPtr subscript(ExpressionPtr value) {
    ExpressionPtr out = make(Kind::kItem);
    add(*out, std::move(value));
    add(*out, is_sign(":") ? nullptr : expression());
    if (is_sign(":")) {
      out->kind = Kind::kSlice;
      while (out->parts.size() < 4 && take_sign(":")) {
        add(*out, is_sign(":") || is_sign("]") ? nullptr : expression());
      }
      out->parts.resize(4);
    } else if (is_sign(",")) {  // an index of several parts is a tuple
      ExpressionPtr index = make(Kind::kTuple);
      add(*index, std::move(out->parts[1]));
      while (take_sign(",")) add(*index, expression());
      require_depth(*out, *index);
      out->parts[1] = std::move(index);
    }
    want_sign("]");
    return out;
  }

  ExpressionPtr call(ExpressionPtr value) {
    ExpressionPtr out = make(Kind::kCall);
    add(*out, std::move(value));
    arguments(*out);
    return out;
  }

  // Parses arguments in parentheses; those by position are appended to parts.
  void arguments(Expression& out) {
    want_sign("(");
    const auto keep = [&](ExpressionPtr& place) {
      if (place != nullptr || out.double_star != nullptr) fail("the arguments are out of order");
      place = expression();
      require_depth(out, *place);
    };
    while (!is_sign(")")) {
      if (take_sign("*")) {
        keep(out.star);
      } else if (take_sign("**")) {
        keep(out.double_star);
      } else if (peek().kind == TokenKind::kName && is_sign("=", 1)) {
        if (out.double_star != nullptr) fail("the arguments are out of order");
        std::string name = want_name();
        want_sign("=");
        for (const auto& other : out.named) {
          if (other.first == name) fail(fmt::format("the argument '{}' is given twice", name));
        }
        ExpressionPtr value = expression();
        require_depth(out, *value);
        out.named.emplace_back(std::move(name), std::move(value));
      } else {
        if (out.star != nullptr || out.double_star != nullptr || !out.named.empty()) {
          fail("the arguments are out of order");
        }
        add(out, expression());
      }
      if (!is_sign(")")) want_sign(",");
    }
    want_sign(")");
  }

  ExpressionPtr primary() {
    const Deeper deeper(*this);
    const Token& token = peek();
    switch (token.kind) {
      case TokenKind::kString:
        return strings();
      case TokenKind::kInteger:
      case TokenKind::kReal:
        return literal(tokens_[at_++].number);
      case TokenKind::kName:
        return word();
      default:
        break;
    }
    if (take_sign("(")) {
      ExpressionPtr value = tuple({.may_be_empty = true});
      want_sign(")");
      return value;
    }
    if (take_sign("[")) return list();
    if (take_sign("{")) return dict();
    fail(fmt::format("expected an expression, found {}", found()));
  }
  ExpressionPtr literal(Value value) {
    ExpressionPtr out = make(Kind::kLiteral);
    out->value = std::move(value);
    return out;
  }
  ExpressionPtr strings() {  // adjacent strings are concatenated
    std::string text;
    while (peek().kind == TokenKind::kString) text += tokens_[at_++].text;
    return literal(Value::of(std::move(text)));
  }
  ExpressionPtr word() {
    const std::string name = want_name();
    if (name == "true" || name == "True") return literal(Value::of(true));
    if (name == "false" || name == "False") return literal(Value::of(false));
    if (name == "none" || name == "None") return literal(Value::none());
    return make(Kind::kName, name);
  }
  ExpressionPtr list() {
    ExpressionPtr out = make(Kind::kList);
    while (!take_sign("]")) {
      add(*out, expression());
      if (!is_sign("]")) want_sign(",");
    }
    return out;
  }
  ExpressionPtr dict() {
    ExpressionPtr out = make(Kind::kDict);
    while (!take_sign("}")) {
      add(*out, expression());
      want_sign(":");
      add(*out, expression());
      if (!is_sign("}")) want_sign(",");
    }
    return out;
  }

  std::vector<Token> tokens_;
  const std::string& source_;
  size_t at_ = 0;
  int depth_ = 0;
  std::vector<std::string> block_names_;
};

}  // namespace

Template parse_template(std::string_view text, const std::string& source) {
  Template out;
  out.body = Parser(tokenize(text, source), source).whole();
  resolve_variables(out, source);
  return out;
}

}  // namespace twell::jinja
