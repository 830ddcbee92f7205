// SPDX-License-Identifier: Apache-2.0
// translate_regex scans the pattern: it copies what Oniguruma and PCRE2 interpret alike, rewrites
// what it can, and refuses the rest.
#include <array>
#include <cctype>

#include "twell/base/error.h"
#include "twell/tokenizer/pre_tokenizer_regex.h"

namespace twell {
namespace {

// White_Space of Unicode; PCRE2's \s also matches U+180E.
constexpr std::string_view kWhiteSpace =
    R"(\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

constexpr std::array<std::string_view, 7> kGroups = {"(?:",  "(?i:", "(?=", "(?!",
                                                     "(?<=", "(?<!", "(?>"};

bool is_ascii_alnum(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }
bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

class Translator {
 public:
  explicit Translator(std::string_view pattern) : rest_(pattern) {}

  std::string run() {
    while (!rest_.empty()) {
      if (rest_[0] == '[') {
        character_class();
      } else {
        outside_class();
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] static void refuse(std::string_view construct) {
    throw InputError(
        fmt::format("the regular expression uses {}, which is not supported", construct));
  }

  void copy(size_t count) {
    out_ += rest_.substr(0, count);
    rest_.remove_prefix(count);
  }

  void outside_class() {
    switch (rest_[0]) {
      case '\\':
        escape(false);
        return;
      case '(':
        group();
        return;
      case '{':
        repeat();
        return;
      case '^':
      case '$':
        refuse("an anchor (^ or $)");
      case ']':
        out_ += '\\';
        copy(1);
        return;
      default:
        copy(1);
    }
  }

  void group() {
    for (const std::string_view opening : kGroups) {
      if (rest_.starts_with(opening)) return copy(opening.size());
    }
    if (rest_.starts_with("(?") || rest_.starts_with("(*")) {
      refuse("a group other than (...), (?:...), (?i:...), (?>...) and look-around");
    }
    copy(1);
  }

  // Copies {n}, {n,} or {n,m}; a suffix is refused because the libraries interpret it differently.
  void repeat() {
    const size_t close = rest_.find('}');
    const bool plain =
        close != std::string_view::npos && close > 1 && rest_[1] != ',' &&
        rest_.substr(1, close - 1).find_first_not_of("0123456789,") == std::string_view::npos;
    if (!plain) refuse("a { that is not {n}, {n,} or {n,m}");
    copy(close + 1);
    if (rest_.starts_with("+") || rest_.starts_with("?") || rest_.starts_with("*"))
      refuse("{n,m} followed by ?, + or *");
  }

  void character_class() {
    copy(1);
    if (rest_.starts_with("^")) copy(1);
    if (rest_.starts_with("]")) refuse("a class that begins with ]");
    bool first = true;
    bool after_set = false;  // previous item was a set (\s, \p{L}), which cannot begin a range
    while (!rest_.starts_with("]")) {
      if (rest_.empty()) refuse("a class without its ]");
      if (rest_[0] == '[') refuse("a class inside a class");
      if (rest_.starts_with("&&")) refuse("a class intersection (&&)");
      if (rest_[0] == '-') {
        dash(first, after_set);
        after_set = false;
      } else if (rest_[0] == '\\') {
        after_set = escape(true);
      } else {
        copy(1);
        after_set = false;
      }
      first = false;
    }
    copy(1);
  }

  // A dash at either end of a class is literal; elsewhere it makes a range of two characters.
  void dash(bool first, bool after_set) {
    const bool last = rest_.size() > 1 && rest_[1] == ']';
    if (first || last) {
      out_ += '\\';
      return copy(1);
    }
    const bool before_set = rest_.size() > 2 && rest_[1] == '\\' &&
                            std::string_view("sSdDpP").find(rest_[2]) != std::string_view::npos;
    if (after_set || before_set) refuse("a range that begins or ends with a set of characters");
    copy(1);
  }

  // Returns whether the escape stands for a set of characters.
  bool escape(bool in_class) {
    if (rest_.size() < 2) refuse("a trailing backslash");
    const char name = rest_[1];
    switch (name) {
      case 's':
        out_ += in_class ? std::string(kWhiteSpace) : fmt::format("[{}]", kWhiteSpace);
        break;
      case 'S':
        if (in_class) refuse("\\S inside a class");
        out_ += fmt::format("[^{}]", kWhiteSpace);
        break;
      case 'd':
        out_ += "\\p{Nd}";
        break;
      case 'D':
        out_ += "\\P{Nd}";
        break;
      case 'p':
      case 'P':
        property();
        return true;
      case 'v':
        out_ += "\\x{b}";
        rest_.remove_prefix(2);
        return false;
      case 'x':
      case 'u':
        code_point();
        return false;
      default: {
        const bool control = std::string_view("rntfae").find(name) != std::string_view::npos;
        const bool letter = is_ascii_alnum(name) || static_cast<unsigned char>(name) >= 0x80;
        if (letter && !control) refuse(fmt::format("the escape \\{}", letter_name(name)));
        copy(2);
        return false;
      }
    }
    rest_.remove_prefix(2);
    return true;
  }

  static std::string letter_name(char name) {
    return is_ascii_alnum(name) ? std::string(1, name) : "of a character beyond ASCII";
  }

  // Copies general categories such as \p{Lu}; scripts are refused because they vary by PCRE2
  // version.
  void property() {
    const size_t close = rest_.find('}');
    const bool braced = rest_.size() > 2 && rest_[2] == '{' && close != std::string_view::npos;
    const std::string_view name = braced ? rest_.substr(3, close - 3) : std::string_view();
    const bool category = (name.size() == 1 || name.size() == 2) &&
                          std::string_view("CLMNPSZ").find(name[0]) != std::string_view::npos &&
                          (name.size() == 1 || (name[1] >= 'a' && name[1] <= 'z'));
    if (!category) refuse("\\p with something else than a general category such as {L} or {Lu}");
    copy(close + 1);
  }

  // Reads \x{H...}, \uHHHH, or \xHH below 80 (from 80 on it is a raw byte to Oniguruma).
  void code_point() {
    const bool braced = rest_[1] == 'x' && rest_.size() > 2 && rest_[2] == '{';
    const size_t begin = braced ? 3 : 2;
    const size_t wanted = braced ? 6 : rest_[1] == 'x' ? 2 : 4;
    size_t end = begin;
    while (end < rest_.size() && end - begin < wanted && is_hex(rest_[end])) ++end;
    const bool closed = !braced || (end < rest_.size() && rest_[end] == '}');
    const bool complete = braced ? end > begin : end - begin == wanted;
    const bool raw_byte = wanted == 2 && rest_.size() > 2 && rest_[2] >= '8';
    if (!closed || !complete || raw_byte) refuse("a malformed or raw-byte \\x or \\u");
    out_ += fmt::format("\\x{{{}}}", rest_.substr(begin, end - begin));
    rest_.remove_prefix(braced ? end + 1 : end);
  }

  std::string_view rest_;
  std::string out_;
};

}  // namespace

std::string translate_regex(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace twell
