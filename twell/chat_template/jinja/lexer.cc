// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/lexer.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/chat_template/jinja/numbers.h"
#include "twell/chat_template/jinja/text.h"

namespace twell::jinja {
namespace {

constexpr std::string_view kNone{};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Line ends become \n, and one at the end of the template is dropped.
std::string with_plain_line_ends(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') continue;
    out += text[i] == '\r' ? '\n' : text[i];
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  Lexer(std::string_view text, const std::string& source)
      : text_owner_(with_plain_line_ends(text)), text_(text_owner_), source_(source) {}

  std::vector<Token> run() {
    TWELL_REQUIRE(find_invalid_utf8(text_) == text_.size(), "{}: the template is not UTF-8",
                  source_);
    while (at_ < text_.size()) root();
    add(TokenKind::kEnd);
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(fmt::format("{}: line {}: {}", source_, line_, message));
  }
  void add(TokenKind kind, std::string text = {}) {
    tokens_.push_back({kind, std::move(text), line_, {}});
  }
  bool next_is(std::string_view part) const { return text_.substr(at_).starts_with(part); }
  char peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  // Moves to byte `end` and counts the lines.
  void move_to(size_t end) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<ptrdiff_t>(at_),
                                         text_.begin() + static_cast<ptrdiff_t>(end), '\n'));
    if (end > at_) line_starting_ = text_[end - 1] == '\n';
    at_ = end;
  }
  void skip_blanks() {
    size_t end = at_;
    while (end < text_.size()) {
      size_t next = end;
      if (!is_blank(next_code_point(text_, next))) break;
      end = next;
    }
    move_to(end);
  }

  // ---- text between tags

  void root() {
    size_t open = at_;
    while (open < text_.size() && !(text_[open] == '{' && open + 1 < text_.size() &&
                                    std::string_view("{%#").find(text_[open + 1]) != kNone.npos)) {
      ++open;
    }
    if (open == text_.size()) {
      add_text(text_.substr(at_));
      return move_to(open);
    }
    const char kind = text_[open + 1];
    const size_t behind = open + 2;
    const char sign =
        behind < text_.size() && (text_[behind] == '-' || text_[behind] == '+') ? text_[behind] : 0;
    add_text(trimmed(text_.substr(at_, open - at_), sign, kind != '{'));
    move_to(behind + (sign != 0 ? 1 : 0));
    if (kind == '#') return comment();
    if (kind == '%' && raw_begins()) return raw();
    add(kind == '{' ? TokenKind::kBeginOutput : TokenKind::kBeginBlock);
    inside(kind == '{' ? "}}" : "%}", kind == '%');
  }

  // The text in front of a tag: without its last blanks where the tag has a '-', else without those
  // between the start of a line and a block.
  std::string_view trimmed(std::string_view text, char sign, bool is_block) const {
    size_t end = text.size();
    while (end > 0) {
      size_t next = end;
      if (!is_blank(previous_code_point(text, next))) break;
      end = next;
    }
    if (sign == '-') return text.substr(0, end);
    if (sign == '+' || !is_block) return text;
    const size_t line = text.rfind('\n') == kNone.npos ? 0 : text.rfind('\n') + 1;
    const bool starts_line = line > 0 || line_starting_;
    return starts_line && end <= line ? text.substr(0, line) : text;
  }
  void add_text(std::string_view text) {
    if (!text.empty()) add(TokenKind::kText, std::string(text));
  }

  // Skips all white space after a closing tag, or the line end after a block.
  void close(size_t end, bool strip, bool trim) {
    move_to(end);
    if (strip) {
      skip_blanks();
    } else if (trim && peek() == '\n') {
      move_to(at_ + 1);
    }
  }

  void comment() {
    const size_t end = text_.find("#}", at_);
    if (end == kNone.npos) fail("a comment without its end");
    const char sign = end > at_ ? text_[end - 1] : '\0';
    close(end + 2, sign == '-', sign != '+');
  }

  // ---- raw blocks

  // Moves behind a raw tag, whose {% stands in front of here; false when it is another tag.
  bool raw_begins() {
    const Position start = position_;
    skip_blanks();
    if (next_is("raw")) {
      move_to(at_ + 3);
      skip_blanks();
      const bool strip = next_is("-%}");
      if (strip || next_is("%}")) {
        close(at_ + (strip ? 3 : 2), strip, false);
        return true;
      }
    }
    position_ = start;
    return false;
  }

  void raw() {
    for (size_t open = at_;; open += 2) {
      open = text_.find("{%", open);
      if (open == kNone.npos) fail("a raw block without its end");
      const Position start = position_;
      at_ = open + 2;
      const char sign = peek() == '-' || peek() == '+' ? peek() : '\0';
      if (sign != 0) ++at_;
      skip_blanks();
      const bool named = next_is("endraw");
      if (named) at_ += 6;
      if (named) skip_blanks();
      const bool strip = next_is("-%}"), keep = next_is("+%}");
      const size_t end = at_ + (strip || keep ? 3 : 2);
      const bool closed = named && (strip || keep || next_is("%}"));
      position_ = start;
      if (!closed) continue;
      add_text(trimmed(text_.substr(at_, open - at_), sign, true));
      return close(end, strip, !keep);
    }
  }

  // ---- tokens of a tag

  void inside(std::string_view end, bool is_block) {
    std::string open;  // brackets, because }} may close two dictionaries
    while (true) {
      skip_blanks();
      if (at_ >= text_.size()) fail("a tag without its end");
      if (open.empty()) {
        const bool strip = peek() == '-' && text_.substr(at_ + 1).starts_with(end);
        const bool keep = is_block && peek() == '+' && text_.substr(at_ + 1).starts_with(end);
        if (strip || keep || next_is(end)) {
          add(is_block ? TokenKind::kEndBlock : TokenKind::kEndOutput);
          return close(at_ + end.size() + (strip || keep ? 1 : 0), strip, is_block && !keep);
        }
      }
      token(open);
    }
  }

  void token(std::string& open) {
    if (is_digit(peek())) return number();
    size_t behind = at_;
    if (is_word(next_code_point(text_, behind))) return name();
    if (peek() == '\'' || peek() == '"') return string(peek());
    sign(open);
  }

  void name() {
    size_t end = at_;
    while (end < text_.size()) {
      size_t next = end;
      if (!is_word(next_code_point(text_, next))) break;
      end = next;
    }
    add(TokenKind::kName, std::string(text_.substr(at_, end - at_)));
    move_to(end);
  }

  void sign(std::string& open) {
    for (const std::string_view two : {"//", "**", "==", "!=", ">=", "<="}) {
      if (next_is(two)) {
        add(TokenKind::kSign, std::string(two));
        return move_to(at_ + 2);
      }
    }
    const char c = peek();
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == kNone.npos) {
      fail(fmt::format("'{}' is not understood",
                       text_.substr(at_, utf8_prefix(text_.substr(at_), 4))));
    }
    if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != c) fail(fmt::format("'{}' is not expected", c));
      open.pop_back();
    }
    add(TokenKind::kSign, std::string(1, c));
    move_to(at_ + 1);
  }

  // Digits with single underscores between them.
  size_t digits_end(size_t at) const {
    while (at < text_.size() &&
           (is_digit(text_[at]) ||
            (text_[at] == '_' && at + 1 < text_.size() && is_digit(text_[at + 1])))) {
      ++at;
    }
    return at;
  }

  void number() {
    const bool behind_dot = at_ > 0 && text_[at_ - 1] == '.';
    size_t end = digits_end(at_);
    bool real = false;
    const auto digit_at = [&](size_t i) { return i < text_.size() && is_digit(text_[i]); };
    if (!behind_dot) {
      if (end < text_.size() && text_[end] == '.' && digit_at(end + 1)) {
        end = digits_end(end + 1);
        real = true;
      }
      if (end < text_.size() && (text_[end] | 0x20) == 'e') {
        const bool sign =
            end + 1 < text_.size() && (text_[end + 1] == '-' || text_[end + 1] == '+');
        if (digit_at(end + (sign ? 2 : 1))) {
          end = digits_end(end + (sign ? 2 : 1));
          real = true;
        }
      }
    }
    if (real) {
      add(TokenKind::kReal);
      tokens_.back().number = Value::of(*parse_real(text_.substr(at_, end - at_)));
      return move_to(end);
    }
    integer();
  }

  void integer() {
    size_t end = at_;
    const char mark = static_cast<char>(peek(1) | 0x20);
    if (peek() == '0' && (mark == 'x' || mark == 'o' || mark == 'b')) {
      const std::string_view digits = mark == 'x'   ? "0123456789abcdefABCDEF"
                                      : mark == 'o' ? "01234567"
                                                    : "01";
      size_t at = at_ + 2;
      while (at < text_.size()) {
        const size_t skip = text_[at] == '_' ? 1 : 0;
        if (at + skip >= text_.size() || digits.find(text_[at + skip]) == kNone.npos) break;
        at += skip + 1;
      }
      end = at > at_ + 2 ? at : at_ + 1;
    } else if (peek() == '0') {
      for (end = at_ + 1; end < text_.size() &&
                          (text_[end] == '0' || (text_[end] == '_' && end + 1 < text_.size() &&
                                                 text_[end + 1] == '0'));) {
        ++end;
      }
    } else {
      end = digits_end(at_);
    }
    const auto value = parse_integer(text_.substr(at_, end - at_), 0);
    if (!value) fail(fmt::format("the number {} is not understood", text_.substr(at_, end - at_)));
    add(TokenKind::kInteger, std::string(text_.substr(at_, end - at_)));
    tokens_.back().number = Value::of(*value);
    move_to(end);
  }

  // ---- strings: escapes are Python's

  void string(char quote) {
    size_t end = at_ + 1;
    while (end < text_.size() && text_[end] != quote) end += text_[end] == '\\' ? 2 : 1;
    if (end >= text_.size()) fail("a string without its end");
    const std::string_view body = text_.substr(at_ + 1, end - at_ - 1);
    std::string value;
    for (size_t i = 0; i < body.size();) {
      if (body[i] != '\\') {
        value += body[i++];
      } else {
        escape(body, i, value);
      }
    }
    add(TokenKind::kString, std::move(value));
    move_to(end + 1);
  }

  // Appends what the backslash at i begins and moves behind it.
  void escape(std::string_view body, size_t& i, std::string& out) {
    const char c = body[i + 1];
    i += 2;
    const size_t plain = std::string_view("\\'\"abfnrtv").find(c);
    if (c == '\n') return;
    if (plain != kNone.npos) {
      out += "\\'\"\a\b\f\n\r\t\v"[plain];
    } else if (c >= '0' && c <= '7') {
      CodePoint value = static_cast<CodePoint>(c - '0');
      for (int more = 0; more < 2 && i < body.size() && body[i] >= '0' && body[i] <= '7'; ++more) {
        value = value * 8 + static_cast<CodePoint>(body[i++] - '0');
      }
      append_code_point(out, value);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t size = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      const std::string_view digits = body.substr(i, size);
      if (digits.size() < size ||
          digits.find_first_not_of("0123456789abcdefABCDEF") != kNone.npos) {
        fail(fmt::format("the escape \\{} lacks digits", c));
      }
      const auto value = static_cast<CodePoint>(*parse_integer(digits, 16));
      if (value > 0x10ffff || (value >= 0xd800 && value <= 0xdfff)) {
        fail(fmt::format("the escape \\{}{} is no character", c, digits));
      }
      append_code_point(out, value);
      i += size;
    } else if (c == 'N') {
      fail("the escape \\N is not supported");
    } else if ((c & 0x80) == 0) {
      out += '\\';
      out += c;
    } else {  // jinja2 writes the character as an escape first, whose backslash this one escapes
      --i;
      const CodePoint value = next_code_point(body, i);
      out += value < 0x100     ? fmt::format("\\x{:02x}", value)
             : value < 0x10000 ? fmt::format("\\u{:04x}", value)
                               : fmt::format("\\U{:08x}", value);
    }
  }

  struct Position {
    size_t at = 0;
    int line = 1;
    bool line_starting = true;  // a line starts here
  };

  const std::string text_owner_;
  const std::string_view text_;
  const std::string& source_;
  Position position_;
  size_t& at_ = position_.at;
  int& line_ = position_.line;
  bool& line_starting_ = position_.line_starting;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view text, const std::string& source) {
  return Lexer(text, source).run();
}

}  // namespace twell::jinja
