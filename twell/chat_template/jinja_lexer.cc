// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja_lexer.h"

#include <algorithm>
#include <cctype>

#include "twell/base/error.h"

namespace twell::jinja {
namespace {

bool is_name_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

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

  // lstrip_blocks: blanks between the start of a line and a block.
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

  // Behind the end of a tag: '-' takes all blanks away, a block or comment its own newline.
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
    int depth = 0;  // of brackets: }} may close two dictionaries
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

}  // namespace

std::vector<Token> tokenize(std::string_view source_text, const std::string& source) {
  return Lexer(source_text, source).run();
}

}  // namespace twell::jinja
