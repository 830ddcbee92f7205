// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <charconv>

#include "twell/base/error.h"
#include "twell/chat_template/jinja.h"

namespace twell::jinja {
namespace {

enum class TokenKind { kText, kBeginOutput, kBeginBlock, kEnd, kName, kString, kNumber, kSign };

struct Token {
  TokenKind kind = TokenKind::kText;
  std::string text;  // of a string: unquoted and unescaped
  int line = 1;
};

bool is_name_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

// Cuts a template into text and the tokens of its {{ }} and {% %}. Also applies whitespace control,
// with trim_blocks and lstrip_blocks on as in transformers.
class Lexer {
 public:
  Lexer(std::string_view text, const std::string& source) : text_(text), source_(source) {
    if (text_.ends_with('\n')) text_.remove_suffix(1);  // keep_trailing_newline is off
  }

  std::vector<Token> run() {
    while (at_ < text_.size()) {
      const size_t open = find_open();
      std::string before(text_.substr(at_, open - at_));
      if (open == text_.size()) {
        add_text(before);
        break;
      }
      const char kind = text_[open + 1];
      const char mark = open + 2 < text_.size() ? text_[open + 2] : ' ';
      if (mark == '-') {
        before.erase(std::find_if_not(before.rbegin(), before.rend(), is_space).base(),
                     before.end());
      } else if (kind != '{' && mark != '+') {
        strip_line_start(before, open);
      }
      add_text(before);
      count_lines(open - at_);
      at_ = open + 2 + (mark == '-' || mark == '+' ? 1 : 0);
      kind == '#' ? skip_comment() : inside(kind);
    }
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(fmt::format("{}: line {}: {}", source_, line_, message));
  }

  size_t find_open() const {
    for (size_t i = at_; i + 1 < text_.size(); ++i) {
      const char next = text_[i + 1];
      if (text_[i] == '{' && (next == '{' || next == '%' || next == '#')) return i;
    }
    return text_.size();
  }

  // lstrip_blocks: removes blanks between the start of a line and a block.
  void strip_line_start(std::string& before, size_t open) const {
    const size_t last = before.find_last_not_of(" \t");
    const bool at_start =
        last == std::string::npos ? at_line_start(open - before.size()) : before[last] == '\n';
    if (at_start) before.erase(last == std::string::npos ? 0 : last + 1);
  }
  bool at_line_start(size_t at) const { return at == 0 || text_[at - 1] == '\n'; }

  void add_text(const std::string& text) {
    if (!text.empty()) tokens_.push_back({TokenKind::kText, text, line_});
  }
  void count_lines(size_t size) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<ptrdiff_t>(at_),
                                         text_.begin() + static_cast<ptrdiff_t>(at_ + size), '\n'));
  }

  // After a tag: strip ('-') removes all white space, trim (block, comment) removes one newline.
  void after(bool strip, bool trim) {
    size_t end = at_;
    if (strip) {
      while (end < text_.size() && is_space(text_[end])) ++end;
    } else if (trim && end < text_.size() && text_[end] == '\n') {
      ++end;
    }
    count_lines(end - at_);
    at_ = end;
  }

  void skip_comment() {
    const size_t close = text_.find("#}", at_);
    if (close == std::string_view::npos) fail("a comment without its end");
    const bool strip = close > at_ && text_[close - 1] == '-';
    count_lines(close - at_);
    at_ = close + 2;
    after(strip, true);
  }

  void inside(char kind) {
    const bool output = kind == '{';
    add(output ? TokenKind::kBeginOutput : TokenKind::kBeginBlock, "");
    const std::string_view close = output ? "}}" : "%}";
    int depth = 0;  // of brackets, because }} may close two dictionaries
    while (true) {
      while (at_ < text_.size() && is_space(text_[at_])) {
        line_ += text_[at_++] == '\n';
      }
      if (at_ >= text_.size()) fail("a tag without its end");
      const bool strip = text_[at_] == '-' && text_.substr(at_ + 1).starts_with(close);
      if (depth == 0 && (strip || text_.substr(at_).starts_with(close))) {
        at_ += close.size() + (strip ? 1 : 0);
        add(TokenKind::kEnd, "");
        return after(strip, !output);
      }
      next_token(depth);
    }
  }

  void next_token(int& depth) {
    const char c = text_[at_];
    if (c == '\'' || c == '"') return string(c);
    if (is_name_char(c)) return word();
    for (const std::string_view two : {"==", "!=", "<=", ">=", "//", "**"}) {
      if (text_.substr(at_).starts_with(two)) {
        add(TokenKind::kSign, std::string(two));
        at_ += 2;
        return;
      }
    }
    if (std::string_view("()[]{}.,:|~+-*/%<>=").find(c) == std::string_view::npos) {
      fail(fmt::format("'{}' is not understood", c));
    }
    depth += (c == '(' || c == '[' || c == '{') - (c == ')' || c == ']' || c == '}');
    add(TokenKind::kSign, std::string(1, c));
    ++at_;
  }

  void word() {
    const bool number = std::isdigit(static_cast<unsigned char>(text_[at_])) != 0;
    size_t end = at_;
    while (end < text_.size() && (is_name_char(text_[end]) ||
                                  (number && text_[end] == '.' && end + 1 < text_.size() &&
                                   std::isdigit(static_cast<unsigned char>(text_[end + 1]))))) {
      ++end;
    }
    add(number ? TokenKind::kNumber : TokenKind::kName, std::string(text_.substr(at_, end - at_)));
    at_ = end;
  }

  void string(char quote) {
    std::string value;
    for (++at_; at_ < text_.size() && text_[at_] != quote; ++at_) {
      char c = text_[at_];
      if (c == '\\' && at_ + 1 < text_.size()) {
        c = text_[++at_];
        const size_t known = std::string_view("nrt").find(c);
        if (known != std::string_view::npos) {
          c = "\n\r\t"[known];
        } else if (c != '\\' && c != '\'' && c != '"') {
          fail(fmt::format("the escape \\{} is not supported", c));
        }
      }
      line_ += text_[at_] == '\n';
      value += c;
    }
    if (at_ >= text_.size()) fail("a string without its end");
    ++at_;
    add(TokenKind::kString, value);
  }

  void add(TokenKind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

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
      if (++parser_.depth_ > kMaxNesting) parser_.fail("nested too deeply");
    }
    ~Deeper() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  // ---- statements
  // Parses up to a block that begins with one of `ends`; the caller consumes that block.
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
    } else if (word == "generation") {  // marks the assistant's text; has no output itself
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

  // Consumes {% endfor %} or a similar block whose word statements() has already checked.
  void end_block() {
    at_ += 2;
    want_end();
  }

  void for_block(Statement& out) {
    out.kind = StatementKind::kFor;
    do out.names.push_back(want_name());
    while (take_sign(","));
    if (!take_word("in")) fail("a loop without 'in'");
    out.expression = either();  // either(), because a following 'if' is the loop's
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
      if_block(next);  // consumes the endif
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

  // ---- expressions, from lowest to highest precedence
  ExpressionPtr make(ExpressionKind kind, std::string name = "") {
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
  ExpressionPtr unary_of(ExpressionKind kind, ExpressionPtr part) {
    ExpressionPtr out = make(kind);
    add(*out, std::move(part));
    return out;
  }
  ExpressionPtr binary(std::string name, ExpressionPtr left, ExpressionPtr right) {
    ExpressionPtr out = make(ExpressionKind::kBinary, std::move(name));
    add(*out, std::move(left));
    add(*out, std::move(right));
    return out;
  }

  ExpressionPtr expression() {
    const Deeper deeper(*this);
    ExpressionPtr value = either();
    while (take_word("if")) {
      ExpressionPtr out = make(ExpressionKind::kCondition);
      add(*out, std::move(value));
      add(*out, either());
      add(*out, take_word("else") ? expression() : nullptr);
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
    return take_word("not") ? unary_of(ExpressionKind::kNot, negation()) : comparison();
  }
  // Takes the comparison that begins here; empty when none does.
  std::string take_comparison() {
    for (const char* sign : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (take_sign(sign)) return sign;
    }
    if (take_word("in")) return "in";
    if (!take_word("not")) return {};
    if (take_word("in")) return "not in";
    --at_;  // a 'not' that begins something else
    return {};
  }
  ExpressionPtr comparison() {
    ExpressionPtr value = sum();
    for (std::string sign = take_comparison(); !sign.empty(); sign = take_comparison()) {
      value = binary(sign, std::move(value), sum());
    }
    return value;
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
    if (take_sign("-")) return unary_of(ExpressionKind::kNegate, unary());
    return filtered(postfix(primary()));
  }

  ExpressionPtr filtered(ExpressionPtr value) {
    while (true) {
      if (take_sign("|")) {
        ExpressionPtr out = make(ExpressionKind::kFilter, want_name());
        add(*out, std::move(value));
        if (take_sign("(")) arguments(*out);
        value = postfix(std::move(out));
      } else if (take_word("is")) {
        const bool negated = take_word("not");
        ExpressionPtr out = make(ExpressionKind::kTest, want_name());
        add(*out, std::move(value));
        if (take_sign("(")) arguments(*out);
        value = negated ? unary_of(ExpressionKind::kNot, std::move(out)) : std::move(out);
      } else {
        return value;
      }
    }
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    while (true) {
      if (take_sign(".")) {
        ExpressionPtr out = make(ExpressionKind::kMember, want_name());
        add(*out, std::move(value));
        value = std::move(out);
      } else if (take_sign("[")) {
        value = subscript(std::move(value));
      } else if (take_sign("(")) {
        ExpressionPtr out = make(ExpressionKind::kCall);
        add(*out, std::move(value));
        arguments(*out);
        value = std::move(out);
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr value) {
    ExpressionPtr out = make(ExpressionKind::kIndex);
    add(*out, std::move(value));
    add(*out, is_sign(":") ? nullptr : expression());
    if (is_sign(":")) {
      out->kind = ExpressionKind::kSlice;
      while (out->parts.size() < 4 && take_sign(":")) {
        add(*out, is_sign(":") || is_sign("]") ? nullptr : expression());
      }
      out->parts.resize(4);
    }
    want_sign("]");
    return out;
  }

  // Parses the arguments after '('; positional ones are appended to parts.
  void arguments(Expression& out) {
    while (!take_sign(")")) {
      const bool named = peek().kind == TokenKind::kName && at_ + 1 < tokens_.size() &&
                         tokens_[at_ + 1].kind == TokenKind::kSign && tokens_[at_ + 1].text == "=";
      if (named) {
        std::string name = want_name();
        want_sign("=");
        ExpressionPtr value = expression();
        require_depth(out, *value);
        out.named.emplace_back(std::move(name), std::move(value));
      } else {
        add(out, expression());
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
      if (take_sign(",")) return list(")", std::move(value));
      want_sign(")");
      return value;
    }
    if (take_sign("[")) return list("]");
    if (take_sign("{")) return dict();
    fail(token.text.empty() ? "an expression is missing"
                            : fmt::format("'{}' is not expected", token.text));
  }
  ExpressionPtr literal(Value value) {
    ExpressionPtr out = make(ExpressionKind::kLiteral);
    out->value = std::move(value);
    return out;
  }
  ExpressionPtr strings() {  // adjacent strings are concatenated
    std::string text;
    while (peek().kind == TokenKind::kString) text += tokens_[at_++].text;
    return literal(Value::of(std::move(text)));
  }
  ExpressionPtr number(const std::string& text) {
    ++at_;
    const char* end = text.data() + text.size();
    int64_t whole = 0;
    double real = 0.0;
    const auto as_whole = std::from_chars(text.data(), end, whole);
    if (as_whole.ec == std::errc() && as_whole.ptr == end) return literal(Value::of(whole));
    const auto as_real = std::from_chars(text.data(), end, real);
    const bool is_real = text.find_first_of(".eE") != std::string::npos;
    if (!is_real || as_real.ec != std::errc() || as_real.ptr != end) {
      fail(fmt::format("the number {} is not supported", text));
    }
    return literal(Value::of(real));
  }
  ExpressionPtr word() {
    const std::string name = want_name();
    if (name == "true" || name == "True") return literal(Value::of(true));
    if (name == "false" || name == "False") return literal(Value::of(false));
    if (name == "none" || name == "None") return literal(Value::none());
    return make(ExpressionKind::kName, name);
  }
  ExpressionPtr list(std::string_view close, ExpressionPtr first = nullptr) {
    ExpressionPtr out = make(ExpressionKind::kList);
    if (first) add(*out, std::move(first));
    while (!take_sign(close)) {
      add(*out, expression());
      if (!is_sign(close)) want_sign(",");
    }
    return out;
  }
  ExpressionPtr dict() {
    ExpressionPtr out = make(ExpressionKind::kDict);
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
};

}  // namespace

Body parse_template(std::string_view text, const std::string& source) {
  return Parser(Lexer(text, source).run(), source).whole();
}

}  // namespace twell::jinja
