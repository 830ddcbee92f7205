// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/error.h"
#include "twell/chat_template/jinja_lexer.h"
#include "twell/chat_template/jinja_syntax.h"

namespace twell::jinja {
namespace {

constexpr int kMaxDepth = 100;  // of nested expressions and blocks: a hostile file must not recurse

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& source)
      : tokens_(std::move(tokens)), source_(source) {}

  Body whole() {
    Body body = statements({});
    if (!finished()) fail("an end without its beginning");
    return body;
  }

 private:
  // ---- tokens
  [[noreturn]] void fail(const std::string& message) const {
    const int line = tokens_.empty() ? 1 : tokens_[std::min(at_, tokens_.size() - 1)].line;
    throw InputError(fmt::format("{}: line {}: {}", source_, line, message));
  }
  bool finished() const { return at_ >= tokens_.size(); }
  const Token& peek() const {
    static const Token kEndToken{TokenKind::kEnd, "", 0};
    return finished() ? kEndToken : tokens_[at_];
  }
  bool is_sign(std::string_view text) const {
    return peek().kind == TokenKind::kSign && peek().text == text;
  }
  bool is_word(std::string_view text) const {
    return peek().kind == TokenKind::kName && peek().text == text;
  }
  bool take_sign(std::string_view text) { return is_sign(text) && (++at_, true); }
  bool take_word(std::string_view text) { return is_word(text) && (++at_, true); }
  void want_sign(std::string_view text) {
    if (!take_sign(text)) fail(fmt::format("expected '{}', found '{}'", text, peek().text));
  }
  void want_end() {
    if (peek().kind != TokenKind::kEnd) fail(fmt::format("'{}' is not expected", peek().text));
    ++at_;
  }
  std::string want_name() {
    if (peek().kind != TokenKind::kName)
      fail(fmt::format("expected a name, found '{}'", peek().text));
    return tokens_[at_++].text;
  }

  class Deeper {
   public:
    explicit Deeper(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kMaxDepth) parser_.fail("nested too deeply");
    }
    ~Deeper() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  // ---- statements
  // Up to a block that begins with one of `ends`, which is left to the caller.
  Body statements(const std::vector<std::string_view>& ends) {
    const Deeper deeper(*this);
    Body body;
    while (!finished()) {
      const Token& token = peek();
      if (token.kind == TokenKind::kText) {
        body.push_back({.kind = StatementKind::kText, .line = token.line, .text = token.text});
        ++at_;
      } else if (token.kind == TokenKind::kBeginOutput) {
        Statement out{.kind = StatementKind::kOutput, .line = token.line};
        ++at_;
        out.expression = expression();
        want_end();
        body.push_back(std::move(out));
      } else {
        const std::string& word = tokens_.at(at_ + 1).text;
        if (std::find(ends.begin(), ends.end(), word) != ends.end()) return body;
        ++at_;
        block(body);
      }
    }
    if (!ends.empty()) fail(fmt::format("'{}' is missing", ends.back()));
    return body;
  }

  void block(Body& body) {
    Statement out{.line = peek().line};
    const std::string word = want_name();
    if (word == "for") {
      for_block(out);
    } else if (word == "if") {
      if_block(out);
    } else if (word == "set") {
      set_block(out);
    } else if (word == "break" || word == "continue") {
      out.kind = word == "break" ? StatementKind::kBreak : StatementKind::kContinue;
      want_end();
    } else if (word == "generation") {  // marks what an assistant says; writes nothing itself
      want_end();
      for (Statement& statement : statements({"endgeneration"}))
        body.push_back(std::move(statement));
      end_block();
      return;
    } else {
      fail(fmt::format("the statement '{}' is not supported", word));
    }
    body.push_back(std::move(out));
  }

  // {% endfor %} and its kin, of which statements() has seen the word.
  void end_block() {
    at_ += 2;
    want_end();
  }

  void for_block(Statement& out) {
    out.kind = StatementKind::kFor;
    do out.names.push_back(want_name());
    while (take_sign(","));
    if (!take_word("in")) fail("a loop without 'in'");
    out.expression = either();  // its own 'if' is the loop's
    if (take_word("if")) out.filter = expression();
    if (is_word("recursive")) fail("recursive loops are not supported");
    want_end();
    out.body = statements({"else", "endfor"});
    if (tokens_.at(at_ + 1).text == "else") {
      end_block();
      out.otherwise = statements({"endfor"});
    }
    end_block();
  }

  void if_block(Statement& out) {
    const Deeper deeper(*this);
    out.kind = StatementKind::kIf;
    out.expression = expression();
    want_end();
    out.body = statements({"elif", "else", "endif"});
    const std::string word = tokens_.at(at_ + 1).text;
    if (word == "elif") {
      at_ += 2;
      Statement next{.line = peek().line};
      if_block(next);  // takes the endif
      out.otherwise.push_back(std::move(next));
      return;
    }
    if (word == "else") {
      end_block();
      out.otherwise = statements({"endif"});
    }
    end_block();
  }

  void set_block(Statement& out) {
    out.kind = StatementKind::kSet;
    out.names.push_back(want_name());
    if (take_sign(".")) out.names.push_back(want_name());
    if (take_sign("=")) {
      out.expression = expression();
      want_end();
      return;
    }
    want_end();
    out.body = statements({"endset"});
    end_block();
  }

  // ---- expressions, from the loosest to the tightest
  ExpressionPtr make(ExpressionKind kind, std::string name = "") {
    auto out = std::make_unique<Expression>();
    out->kind = kind;
    out->line = peek().line;
    out->name = std::move(name);
    return out;
  }
  ExpressionPtr binary(std::string name, ExpressionPtr left, ExpressionPtr right) {
    ExpressionPtr out = make(ExpressionKind::kBinary, std::move(name));
    out->parts.push_back(std::move(left));
    out->parts.push_back(std::move(right));
    return out;
  }

  ExpressionPtr expression() {
    const Deeper deeper(*this);
    ExpressionPtr value = either();
    while (take_word("if")) {
      ExpressionPtr out = make(ExpressionKind::kCondition);
      out->parts.push_back(std::move(value));
      out->parts.push_back(either());
      out->parts.push_back(take_word("else") ? expression() : nullptr);
      value = std::move(out);
    }
    return value;
  }
  ExpressionPtr either() {
    ExpressionPtr value = both();
    while (take_word("or")) value = binary("or", std::move(value), both());
    return value;
  }
  ExpressionPtr both() {
    ExpressionPtr value = negation();
    while (take_word("and")) value = binary("and", std::move(value), negation());
    return value;
  }
  ExpressionPtr negation() {
    const Deeper deeper(*this);
    if (!take_word("not")) return comparison();
    ExpressionPtr out = make(ExpressionKind::kNot);
    out->parts.push_back(negation());
    return out;
  }
  ExpressionPtr comparison() {
    ExpressionPtr value = sum();
    while (true) {
      const size_t before = at_;
      bool found = false;
      for (const char* sign : {"==", "!=", "<=", ">=", "<", ">"}) {
        if (!take_sign(sign)) continue;
        value = binary(sign, std::move(value), sum());
        found = true;
        break;
      }
      if (found) continue;
      if (take_word("in")) {
        value = binary("in", std::move(value), sum());
      } else if (take_word("not")) {
        if (!take_word("in")) {
          at_ = before;
          return value;
        }
        value = binary("not in", std::move(value), sum());
      } else {
        return value;
      }
    }
  }
  ExpressionPtr sum() {
    ExpressionPtr value = product();
    while (is_sign("+") || is_sign("-") || is_sign("~")) {
      const std::string sign = tokens_[at_++].text;
      value = binary(sign, std::move(value), product());
    }
    return value;
  }
  ExpressionPtr product() {
    ExpressionPtr value = unary();
    while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
      const std::string sign = tokens_[at_++].text;
      value = binary(sign, std::move(value), unary());
    }
    return value;
  }
  ExpressionPtr unary() {
    const Deeper deeper(*this);
    if (take_sign("-")) {
      ExpressionPtr out = make(ExpressionKind::kNegate);
      out->parts.push_back(unary());
      return out;
    }
    return filtered(postfix(primary()));
  }

  ExpressionPtr filtered(ExpressionPtr value) {
    while (true) {
      if (take_sign("|")) {
        ExpressionPtr out = make(ExpressionKind::kFilter, want_name());
        out->parts.push_back(std::move(value));
        if (take_sign("(")) arguments(*out);
        value = postfix(std::move(out));
      } else if (take_word("is")) {
        const bool negated = take_word("not");
        ExpressionPtr out = make(ExpressionKind::kTest, want_name());
        out->parts.push_back(std::move(value));
        if (take_sign("(")) arguments(*out);
        value = std::move(out);
        if (negated) {
          ExpressionPtr inverse = make(ExpressionKind::kNot);
          inverse->parts.push_back(std::move(value));
          value = std::move(inverse);
        }
      } else {
        return value;
      }
    }
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    while (true) {
      if (take_sign(".")) {
        ExpressionPtr out = make(ExpressionKind::kMember, want_name());
        out->parts.push_back(std::move(value));
        value = std::move(out);
      } else if (take_sign("[")) {
        value = subscript(std::move(value));
      } else if (take_sign("(")) {
        ExpressionPtr out = make(ExpressionKind::kCall);
        out->parts.push_back(std::move(value));
        arguments(*out);
        value = std::move(out);
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr value) {
    ExpressionPtr out = make(ExpressionKind::kIndex);
    out->parts.push_back(std::move(value));
    out->parts.push_back(is_sign(":") ? nullptr : expression());
    if (is_sign(":")) {
      out->kind = ExpressionKind::kSlice;
      while (out->parts.size() < 4 && take_sign(":")) {
        out->parts.push_back(is_sign(":") || is_sign("]") ? nullptr : expression());
      }
      out->parts.resize(4);
    }
    want_sign("]");
    return out;
  }

  // Behind '(': positional ones go to parts.
  void arguments(Expression& out) {
    while (!take_sign(")")) {
      const bool named = peek().kind == TokenKind::kName && at_ + 1 < tokens_.size() &&
                         tokens_[at_ + 1].kind == TokenKind::kSign && tokens_[at_ + 1].text == "=";
      if (named) {
        std::string name = want_name();
        want_sign("=");
        out.named.emplace_back(std::move(name), expression());
      } else {
        out.parts.push_back(expression());
      }
      if (!is_sign(")")) want_sign(",");
    }
  }

  ExpressionPtr primary() {
    const Deeper deeper(*this);
    const Token token = peek();
    if (token.kind == TokenKind::kString) return strings();
    if (token.kind == TokenKind::kNumber) return number(token.text);
    if (token.kind == TokenKind::kName) return word();
    if (take_sign("(")) {
      ExpressionPtr value = expression();
      if (is_sign(",")) return tuple(std::move(value));
      want_sign(")");
      return value;
    }
    if (take_sign("[")) return list("]");
    if (take_sign("{")) return dict();
    fail(token.text.empty() ? "an expression is missing"
                            : fmt::format("'{}' is not expected", token.text));
  }
  ExpressionPtr literal(Json value) {
    ExpressionPtr out = make(ExpressionKind::kLiteral);
    out->value = Value(std::move(value));
    return out;
  }
  ExpressionPtr strings() {  // neighbours are one
    std::string text;
    while (peek().kind == TokenKind::kString) text += tokens_[at_++].text;
    return literal(text);
  }
  ExpressionPtr number(const std::string& text) {
    ++at_;
    const Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!value.is_number()) fail(fmt::format("the number {} is not supported", text));
    return literal(value);
  }
  ExpressionPtr word() {
    const std::string name = want_name();
    if (name == "true" || name == "True") return literal(true);
    if (name == "false" || name == "False") return literal(false);
    if (name == "none" || name == "None") return literal(nullptr);
    return make(ExpressionKind::kName, name);
  }
  ExpressionPtr list(std::string_view close) {
    ExpressionPtr out = make(ExpressionKind::kList);
    while (!take_sign(close)) {
      out->parts.push_back(expression());
      if (!is_sign(close)) want_sign(",");
    }
    return out;
  }
  ExpressionPtr tuple(ExpressionPtr first) {
    want_sign(",");
    ExpressionPtr out = list(")");
    out->parts.insert(out->parts.begin(), std::move(first));
    return out;
  }
  ExpressionPtr dict() {
    ExpressionPtr out = make(ExpressionKind::kDict);
    while (!take_sign("}")) {
      out->parts.push_back(expression());
      want_sign(":");
      out->parts.push_back(expression());
      if (!is_sign("}")) want_sign(",");
    }
    return out;
  }

  std::vector<Token> tokens_;
  const std::string& source_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

Body parse_template(std::string_view text, const std::string& source) {
  return Parser(tokenize(text, source), source).whole();
}

}  // namespace twell::jinja
