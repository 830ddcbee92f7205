// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/tool_calls.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/json.h"
#include "twell/grammar/json_schema.h"
#include "twell/infer/generated_text.h"

namespace twell {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::string_view kHermesMark = "<tool_call>", kHermesEnd = "</tool_call>";
constexpr std::string_view kMistralMark = "[TOOL_CALLS]";
constexpr std::string_view kLlamaMark = "<|python_tag|>";
constexpr size_t kMostNameBytes = 256;

std::string_view mark_of(ToolForm form) {
  return form == ToolForm::kHermes    ? kHermesMark
         : form == ToolForm::kMistral ? kMistralMark
                                      : kLlamaMark;
}

const char* arguments_key(ToolForm form) {
  return form == ToolForm::kLlama3 ? "parameters" : "arguments";
}

ordered_json any_object() { return {{"type", "object"}, {"additionalProperties", true}}; }

ordered_json schema_format(ordered_json schema) {
  return {{"type", "json_schema"}, {"json_schema", std::move(schema)}, {"max_whitespace_cnt", 32}};
}

// The part of a structural tag that is JSON, any object or by a schema.
ordered_json json_format(const GrammarText& text) {
  if (text.kind == GrammarText::Kind::kJson) return schema_format(any_object());
  TWELL_CHECK(text.kind == GrammarText::Kind::kJsonSchema, "a text that is no JSON beside calls");
  return schema_format(ordered_json::parse(checked_json_schema(text.text, "the JSON schema")));
}

// The text of a JSON string with its quotes; nothing if it is none.
std::optional<std::string> string_of(std::string_view text) {
  try {
    const json value = parse_json(text, "a call");
    if (value.is_string()) return value.get<std::string>();
  } catch (const InputError&) {
    // A model's text.
  }
  return std::nullopt;
}

}  // namespace

std::optional<ToolForm> tool_form(std::string_view text) {
  const auto has = [&](std::string_view part) { return text.find(part) != std::string_view::npos; };
  if (!has("tools")) return std::nullopt;
  if (has("<function=") || has("[ARGS]") || has("<arg_key>")) return std::nullopt;  // other forms
  if (has(kHermesMark)) return ToolForm::kHermes;
  if (has(kMistralMark)) return ToolForm::kMistral;
  if (has(kLlamaMark) || (has("\"parameters\"") && has("ipython"))) return ToolForm::kLlama3;
  return std::nullopt;
}

std::vector<std::string> tool_marks() {
  return {std::string(kHermesMark), std::string(kHermesEnd), std::string(kMistralMark),
          std::string(kLlamaMark)};
}

std::optional<GrammarText> tool_grammar(ToolForm form, const std::vector<Tool>& tools,
                                        const ToolCallLimits& limits,
                                        const std::optional<GrammarText>& text) {
  if (limits.choice == ToolChoice::kNone || tools.empty()) return text;
  const bool any_strict = std::ranges::any_of(tools, &Tool::strict);
  const bool may_be_text = limits.choice == ToolChoice::kAuto;
  const bool free = may_be_text && !text;
  // Answers of Llama's form begin with a call or have none, so there is no mark to wait for.
  if (free && (form == ToolForm::kLlama3 || (!any_strict && limits.parallel))) return std::nullopt;
  if (free && form == ToolForm::kMistral && !any_strict) return std::nullopt;
  const bool is_hermes = form == ToolForm::kHermes, is_mistral = form == ToolForm::kMistral;
  // The mark is the trigger where text may be in front of it.
  const std::string begin = is_hermes            ? std::string(kHermesMark) + "\n"
                            : is_mistral && free ? std::string(kMistralMark) + "["
                                                 : "";
  const std::string end = is_hermes            ? "\n" + std::string(kHermesEnd)
                          : is_mistral && free ? "]"
                                               : "";
  ordered_json tags = ordered_json::array();
  for (const Tool& tool : tools) {
    ordered_json schema = any_object();
    if (!tool.parameters.empty() && (tool.strict || !may_be_text)) {
      const std::string name = fmt::format("the parameters of the function \"{}\"", tool.name);
      try {
        schema = ordered_json::parse(checked_json_schema(tool.parameters, name));
      } catch (const InputError& error) {
        throw InputError(fmt::format("{}: {}", name, error.what()));
      }
    }
    tags.push_back({{"type", "tag"},
                    {"begin", fmt::format("{}{{\"name\": {}, \"{}\": ", begin,
                                          json(tool.name).dump(), arguments_key(form))},
                    {"content", schema_format(std::move(schema))},
                    {"end", "}" + end}});
  }
  ordered_json format;
  if (free) {
    format = {{"type", "triggered_tags"},
              {"triggers", {mark_of(form)}},
              {"tags", std::move(tags)},
              {"stop_after_first", !limits.parallel || is_mistral}};
  } else {
    format = {{"type", "tags_with_separator"},
              {"tags", std::move(tags)},
              {"separator", is_mistral ? ", " : "\n"},
              {"at_least_one", true},
              {"stop_after_first", !limits.parallel || form == ToolForm::kLlama3}};
    if (is_mistral) {
      format = {{"type", "sequence"},
                {"elements",
                 {{{"type", "const_string"}, {"value", std::string(kMistralMark) + "["}},
                  std::move(format),
                  {{"type", "const_string"}, {"value", "]"}}}}};
    }
  }
  if (may_be_text && text) {
    format = {{"type", "or"}, {"elements", {std::move(format), json_format(*text)}}};
  }
  return GrammarText{
      GrammarText::Kind::kTags,
      ordered_json{{"type", "structural_tag"}, {"format", std::move(format)}}.dump()};
}

ToolCallIds::ToolCallIds(ToolForm form)
    : short_(form == ToolForm::kMistral),
      first_((uint64_t{std::random_device()()} << 32) | std::random_device()()) {}

std::string ToolCallIds::id(size_t sequence, int64_t call) const {
  const uint64_t number = first_ + (uint64_t{sequence} << 12) + static_cast<uint64_t>(call);
  return short_ ? fmt::format("{:09x}", number & 0xfffffffff) : fmt::format("call_{:024x}", number);
}

ToolCallReader::ToolCallReader(ToolForm form, std::set<std::string> names, int64_t most_calls,
                               bool only_calls)
    : form_(form),
      names_(std::move(names)),
      most_calls_(most_calls),
      only_calls_(only_calls),
      place_(form == ToolForm::kLlama3 ? Place::kBeforeCall : Place::kText) {}

ToolCallReader::Found ToolCallReader::push(std::string_view text, bool ends) {
  Found found;
  rest_ += text;
  while (advance(found, ends)) {
  }
  if (ends) {
    // What is left of a call that has not begun is text; of one that has, its arguments are sent.
    if (place_ == Place::kCall && told_) {
      is_cut_ = !arguments_end_;
      end_call();
    }
    if (place_ == Place::kBeforeCall || place_ == Place::kCall) give_up(found);
    // Blanks between calls belong to neither.
    const bool blank = rest_.find_first_not_of(kBlanks) == std::string::npos;
    if (place_ == Place::kText && (calls_ == 0 || !blank)) found.text += rest_;
    rest_.clear();
  }
  if (only_calls_) found.text.clear();
  return found;
}

// Reads on. False: there is nothing more to do with what is there.
bool ToolCallReader::advance(Found& found, bool ends) {
  switch (place_) {
    case Place::kText:
      return read_text(found, ends);
    case Place::kBeforeCall:
      return read_before_call(found, ends);
    case Place::kCall:
      return read_call(found, ends);
    case Place::kBehindCall:
      return read_behind_call(found, ends);
    case Place::kOver:
      return false;
  }
  return false;
}

bool ToolCallReader::read_text(Found& found, bool) {
  const std::string_view mark = mark_of(form_);
  const size_t at = form_ == ToolForm::kLlama3 ? std::string::npos : rest_.find(mark);
  if (at == std::string::npos) {
    // Blanks and the beginning of a mark wait, because blanks in front of a mark belong to it.
    size_t keep = form_ == ToolForm::kLlama3 ? 0 : partial_match(rest_, mark);
    if (form_ != ToolForm::kLlama3) {
      const size_t last = rest_.find_last_not_of(kBlanks, rest_.size() - keep - 1);
      const size_t first_blank = rest_.size() == keep        ? 0
                                 : last == std::string::npos ? 0
                                                             : last + 1;
      keep = rest_.size() - first_blank;
    }
    found.text += rest_.substr(0, rest_.size() - keep);
    rest_.erase(0, rest_.size() - keep);
    return false;
  }
  const size_t last = at == 0 ? std::string::npos : rest_.find_last_not_of(kBlanks, at - 1);
  const size_t text = last == std::string::npos ? 0 : last + 1;
  found.text += rest_.substr(0, text);
  mark_ = rest_.substr(text, at + mark.size() - text);
  rest_.erase(0, at + mark.size());
  place_ = Place::kBeforeCall;
  return true;
}

bool ToolCallReader::read_before_call(Found& found, bool) {
  while (!rest_.empty()) {
    const size_t blanks = std::min(rest_.find_first_not_of(kBlanks), rest_.size());
    mark_ += rest_.substr(0, blanks);
    rest_.erase(0, blanks);
    if (rest_.empty()) return false;
    if (form_ == ToolForm::kLlama3 && rest_.front() == '<') {
      if (rest_.starts_with(kLlamaMark)) {
        mark_ += kLlamaMark;
        rest_.erase(0, kLlamaMark.size());
        continue;
      }
      if (kLlamaMark.starts_with(rest_)) return false;
    }
    if (form_ == ToolForm::kMistral && rest_.front() == '[' && !mark_.ends_with('[')) {
      mark_ += '[';
      rest_.erase(0, 1);
      continue;
    }
    if (rest_.front() != '{') {
      give_up(found);
      return true;
    }
    place_ = Place::kCall;
    return true;
  }
  return false;
}

// Reads characters of the call's object, until it ends or is none.
bool ToolCallReader::read_call(Found& found, bool) {
  object_ += std::exchange(rest_, {});
  for (; at_ < object_.size(); ++at_) {
    const char one = object_[at_];
    if (in_string_) {
      if (escaped_) {
        escaped_ = false;
      } else if (one == '\\') {
        escaped_ = true;
      } else if (one == '"') {
        in_string_ = false;
        if (depth_ == 1 && !in_value_) {  // a key
          const auto key = string_of(std::string_view(object_).substr(begin_, at_ + 1 - begin_));
          key_ = key.value_or("");
        }
      }
      continue;
    }
    if (kBlanks.find(one) != std::string_view::npos) continue;
    if (expects_value_) {
      expects_value_ = false;
      in_value_ = true;
      begin_ = at_;
      if (key_ == "arguments" || key_ == "parameters") {
        if (one != '{' || arguments_) {
          give_up(found);
          return true;
        }
        arguments_ = at_;
      }
    }
    if (one == '"') {
      in_string_ = true;
      if (!in_value_) begin_ = at_;
    } else if (one == '{' || one == '[') {
      ++depth_;
    } else if (one == ':' && depth_ == 1 && !in_value_) {
      expects_value_ = true;
    } else if (one == '}' || one == ']' || one == ',') {
      const bool closes = one != ',';
      if (depth_ == 1 && in_value_) {
        in_value_ = false;
        if (key_ == "name") {
          const auto name = string_of(std::string_view(object_).substr(begin_, at_ - begin_));
          const bool known = name && (form_ != ToolForm::kLlama3 || names_.contains(*name));
          if (!known || name->empty() || name->size() > kMostNameBytes || !name_.empty()) {
            give_up(found);
            return true;
          }
          name_ = *name;
        }
        key_.clear();
      }
      if (closes && --depth_ == 1 && arguments_ && !arguments_end_) arguments_end_ = at_ + 1;
      if (depth_ == 0) {
        ++at_;
        if (name_.empty()) {
          give_up(found);
          return true;
        }
        emit(found, arguments_ ? std::string_view(object_).substr(0, *arguments_end_) : "{}");
        rest_ = object_.substr(at_);
        end_call();
        return true;
      }
    }
  }
  if (!name_.empty() && arguments_) {
    emit(found, std::string_view(object_).substr(0, arguments_end_.value_or(object_.size())));
  }
  return false;
}

// Sends the name, if it was not yet, and the arguments up to the end of `upto`, which is the object
// so far, or "{}" where it has none.
void ToolCallReader::emit(Found& found, std::string_view upto) {
  if (form_ == ToolForm::kLlama3 && !arguments_) return;
  if (calls_ >= most_calls_ && !told_) return;
  ToolCallPiece piece;
  if (!told_) {
    told_ = true;
    piece.call = calls_++;
    piece.name = name_;
  } else {
    piece.call = calls_ - 1;
  }
  const std::string_view arguments = arguments_ ? upto.substr(*arguments_) : upto;
  if (arguments.size() > sent_) piece.arguments = arguments.substr(sent_);
  sent_ = std::max(sent_, arguments.size());
  if (!piece.name.empty() || !piece.arguments.empty()) found.pieces.push_back(std::move(piece));
}

void ToolCallReader::end_call() {
  place_ = Place::kBehindCall;
  told_ = in_string_ = escaped_ = expects_value_ = in_value_ = false;
  mark_.clear();
  object_.clear();
  key_.clear();
  name_.clear();
  arguments_.reset();
  arguments_end_.reset();
  at_ = begin_ = sent_ = 0;
  depth_ = 0;
}

bool ToolCallReader::read_behind_call(Found&, bool) {
  const size_t blanks = std::min(rest_.find_first_not_of(kBlanks), rest_.size());
  rest_.erase(0, blanks);
  if (rest_.empty()) return false;
  if (form_ == ToolForm::kHermes) {
    if (rest_.starts_with(kHermesEnd)) {
      rest_.erase(0, kHermesEnd.size());
      place_ = Place::kText;
      return true;
    }
    if (kHermesEnd.starts_with(rest_)) return false;
    place_ = Place::kText;
    return true;
  }
  const char separator = form_ == ToolForm::kMistral ? ',' : ';';
  if (rest_.front() == separator || (form_ == ToolForm::kLlama3 && rest_.front() == '{')) {
    if (rest_.front() == separator) rest_.erase(0, 1);
    place_ = Place::kBeforeCall;
    return true;
  }
  // The list of Mistral's calls has ended, and with it the answer.
  place_ = Place::kOver;
  rest_.clear();
  return false;
}

// What was read in front of the call, and of it, is text.
void ToolCallReader::give_up(Found& found) {
  const bool was_told = told_;
  std::string text = mark_ + object_ + rest_;
  end_call();
  place_ = Place::kText;
  rest_.clear();
  if (was_told) return;  // half of it was sent as a call: the rest is dropped
  if (form_ == ToolForm::kLlama3) {
    found.text += text;
    return;
  }
  // A further mark in it may begin a call.
  const size_t mark = mark_of(form_).size();
  const size_t next = text.find(mark_of(form_), text.find(mark_of(form_)) == 0 ? mark : 1);
  const size_t end =
      next == std::string::npos ? text.size() - partial_match(text, mark_of(form_)) : next;
  found.text += text.substr(0, end);
  rest_ = text.substr(end);
}

}  // namespace twell
