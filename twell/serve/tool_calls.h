// SPDX-License-Identifier: Apache-2.0
// Calls of tools as models write them: the form that a checkpoint's template uses, reading calls
// out of a text while it grows, and the grammar of texts that are calls.
//
//   - Hermes, Qwen: <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>, one after the
//     other
//   - Llama 3: {"name": NAME, "parameters": {...}}, after <|python_tag|> or as the whole answer
//   - Mistral: [TOOL_CALLS][{"name": NAME, "arguments": {...}}, ...]
//
// In: pieces of text, from an untrusted model. Out: text that is no call, and pieces of calls. Time
// is linear in the text. What looks like a call but is none is text.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "twell/grammar/grammar.h"

namespace twell {

enum class ToolForm { kHermes, kLlama3, kMistral };

// The form that a template's text shows. Nothing when it takes no tools, or writes calls in a form
// that is not known here.
std::optional<ToolForm> tool_form(std::string_view tool_template);

// Special tokens that are part of a text with calls.
std::vector<std::string> tool_marks();

struct Tool {
  std::string name;
  std::string parameters;  // JSON schema; empty: any object
  bool strict = false;     // its arguments validate in any case
};

enum class ToolChoice { kNone, kAuto, kRequired };

struct ToolCallLimits {
  ToolChoice choice = ToolChoice::kAuto;
  bool parallel = true;  // several calls in an answer
};

// The grammar that answers are drawn by; none for a free text in which nothing must hold. text:
// what answers without calls are drawn by, JSON or a JSON schema; none: they are any text.
// InputError for a tool's schema that cannot be used, with the tool's name.
std::optional<GrammarText> tool_grammar(ToolForm form, const std::vector<Tool>& tools,
                                        const ToolCallLimits& limits,
                                        const std::optional<GrammarText>& text = std::nullopt);

// A part of a call. The first of each call has its name.
struct ToolCallPiece {
  int64_t call = 0;  // 0: the first of the answer
  std::string name;
  std::string arguments;  // next characters of a JSON object
};

// Ids of an answer's calls, which no other answer has.
class ToolCallIds {
 public:
  explicit ToolCallIds(ToolForm form);
  std::string id(size_t sequence, int64_t call) const;

 private:
  bool short_;  // templates of Mistral take nine letters and digits
  uint64_t first_;
};

class ToolCallReader {
 public:
  // most_calls: further ones are dropped. names: of the tools. only_calls: answers have no text, so
  // that the beginning of a call that was cut off is dropped.
  ToolCallReader(ToolForm form, std::set<std::string> names, int64_t most_calls,
                 bool only_calls = false);

  struct Found {
    std::string text;  // that is no call
    std::vector<ToolCallPiece> pieces;
  };
  // What is new. ends: nothing follows.
  Found push(std::string_view text, bool ends);
  int64_t calls() const { return calls_; }  // so far, complete or not
  bool is_cut() const { return is_cut_; }   // the answer ended within the last call's arguments
  ToolForm form() const { return form_; }

 private:
  enum class Place { kText, kBeforeCall, kCall, kBehindCall, kOver };
  bool advance(Found& found, bool ends);
  bool read_text(Found& found, bool ends);
  bool read_before_call(Found& found, bool ends);
  bool read_call(Found& found, bool ends);
  bool read_behind_call(Found& found, bool ends);
  void give_up(Found& found);
  void end_call();
  void emit(Found& found, std::string_view arguments);

  ToolForm form_;
  std::set<std::string> names_;
  int64_t most_calls_;
  bool only_calls_;
  bool is_cut_ = false;
  int64_t calls_ = 0;
  Place place_;
  std::string rest_;    // not yet read
  std::string mark_;    // read in front of the call, in case it is none
  bool told_ = false;   // the call's name
  std::string object_;  // characters of the call's object so far
  // Where the reader is in the object.
  size_t at_ = 0;  // read so far
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false;
  std::string key_;   // of the outermost object
  size_t begin_ = 0;  // of the string or the value being read
  bool expects_value_ = false, in_value_ = false;
  std::string name_;
  std::optional<size_t> arguments_, arguments_end_;
  size_t sent_ = 0;  // characters of the arguments
};

}  // namespace twell
