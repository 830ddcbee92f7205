// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/gbnf.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "twell/base/error.h"

namespace twell {
namespace {

constexpr size_t kMostNesting = 64;  // of brackets, which the library parses recursively
constexpr int kMostRepeated = 4;     // repetitions of a repetition, each of which takes brackets
constexpr size_t kMostCount = 64;    // characters of "{n,m}"
constexpr std::string_view kAnyCharacter = "[\\u0000-\\U0010FFFF]";
constexpr std::string_view kBlanks = " \t\r\n";

bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-' || c == '.';
}

// Where what begins at `at` ends: a text in quotes, a class of characters, a number of repetitions,
// a comment, a word, or one character.
size_t end_of(std::string_view text, size_t at) {
  const char first = text[at];
  if (first == '#') return std::min(text.find('\n', at), text.size());
  if (first == '"' || first == '[') {
    const char last = first == '"' ? '"' : ']';
    for (++at; at < text.size() && text[at] != last; ++at) at += text[at] == '\\';
    return std::min(at + 1, text.size());
  }
  if (text.substr(at).starts_with("::=")) return at + 3;
  if (first == '{') {
    const size_t last = text.substr(at, kMostCount).find('}');
    return last == text.npos ? at + 1 : at + last + 1;
  }
  if (!in_word(first)) return at + 1;
  while (at < text.size() && in_word(text[at])) ++at;
  return at;
}

bool defines_rule(std::string_view text, size_t word_end) {
  const size_t next = text.find_first_not_of(kBlanks, word_end);
  return next != text.npos && text.substr(next).starts_with("::=");
}

class Translator {
 public:
  explicit Translator(std::string_view text) : text_(text) {
    for (size_t at = 0; at < text.size();) {
      const size_t end = end_of(text, at);
      if (in_word(text[at]) && defines_rule(text, end)) names_.insert(text.substr(at, end - at));
      at = end;
    }
  }

  std::string translated() {
    for (size_t at = 0; at < text_.size();) {
      const size_t end = end_of(text_, at);
      read(text_.substr(at, end - at), end);
      at = end;
    }
    end_alternative();
    return std::move(out_);
  }

 private:
  void read(std::string_view piece, size_t end) {
    const char first = piece[0];
    if (first == '#' || kBlanks.find(first) != kBlanks.npos) {
      out_ += piece;
    } else if (piece == "::=") {
      out_ += piece;
      begin_alternative();
    } else if (first == '"' || first == '[') {
      element(piece);
    } else if (in_word(first)) {
      word(piece, end);
    } else if (first == '(') {
      TWELL_REQUIRE(groups_.size() < kMostNesting, "the grammar has brackets more than {} deep",
                    kMostNesting);
      groups_.push_back(out_.size());
      out_ += piece;
      begin_alternative();
    } else if (first == ')') {
      end_alternative();
      out_ += piece;
      begin_ = groups_.empty() ? out_.size() - 1 : groups_.back();
      if (!groups_.empty()) groups_.pop_back();
      repeated_ = 0;
    } else if (first == '|') {
      end_alternative();
      out_ += piece;
      begin_alternative();
    } else if (first == '*' || first == '+' || first == '?' || first == '{') {
      repeat();
      out_ += piece;
    } else {
      out_ += piece;
    }
  }

  void begin_alternative() {
    is_empty_ = true;
    empty_at_ = out_.size();
  }
  // An alternative that has nothing in it is the empty text.
  void end_alternative() {
    if (!is_empty_) return;
    out_.insert(empty_at_, " \"\"");  // in front of blanks, because the rule's line ends there
    is_empty_ = false;
  }

  void element(std::string_view piece) {
    is_empty_ = false;
    repeated_ = 0;
    begin_ = out_.size();
    out_ += piece;
  }

  void word(std::string_view piece, size_t end) {
    if (defines_rule(text_, end)) {
      end_alternative();
      name(piece);
      return;
    }
    // Names of XGrammar's rules may have dots.
    if (names_.contains(piece) || piece.find('.') == piece.npos) {
      begin_word();
      return name(piece);
    }
    for (size_t at = 0; at < piece.size();) {
      const size_t dot = std::min(piece.find('.', at), piece.size());
      if (dot > at) {
        begin_word();
        name(piece.substr(at, dot - at));
      }
      if (dot < piece.size()) element(kAnyCharacter);
      at = dot + 1;
    }
  }
  void begin_word() { element(out_.empty() || !in_word(out_.back()) ? "" : " "); }
  void name(std::string_view piece) {
    const bool taken = piece == "true" || piece == "false" || (piece[0] >= '0' && piece[0] <= '9');
    if (taken && names_.contains(piece)) out_ += '_';
    out_ += piece;
  }

  void repeat() {
    if (std::exchange(is_empty_, false)) return;  // of nothing: the library refuses it
    if (repeated_++ == 0) return;
    TWELL_REQUIRE(repeated_ <= kMostRepeated, "the grammar repeats a repetition more than {} times",
                  kMostRepeated);
    out_.insert(begin_, "(");
    out_ += ')';
  }

  std::string_view text_;
  std::set<std::string_view> names_;  // of rules
  std::string out_;
  bool is_empty_ = false;       // the alternative so far,
  size_t empty_at_ = 0;         // which begins here in out_
  size_t begin_ = 0;            // of the last element in out_
  int repeated_ = 0;            // how many repetitions stand behind it
  std::vector<size_t> groups_;  // beginnings of open groups in out_
};

}  // namespace

std::string ebnf_of_gbnf(std::string_view text) { return Translator(text).translated(); }

}  // namespace twell
