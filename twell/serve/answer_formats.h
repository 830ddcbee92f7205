// SPDX-License-Identifier: Apache-2.0
// The answers of both kinds of completions in OpenAI's form, as a whole or in chunks.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twell/serve/answers.h"
#include "twell/serve/openai.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// Writes the answer of one kind of completion, as a whole or in chunks.
class Format {
 public:
  virtual ~Format() = default;
  // A choice of a chunk: what the event adds; null when it adds nothing that is shown.
  virtual nlohmann::ordered_json delta(const AnswerEvent& event) = 0;
  // A choice of a whole answer, after add() of each of its events.
  virtual void add(const AnswerEvent& event) = 0;
  virtual nlohmann::ordered_json choice(size_t sequence) = 0;
  virtual const char* object(bool chunk) const = 0;
  virtual const char* id_prefix() const = 0;
};

// What a choice collects.
struct Collected {
  explicit Collected(const Tokenizer& tokenizer) : completion_log_probs(tokenizer) {}

  std::string text;
  std::optional<StopReason> stop;
  CompletionLogProbs completion_log_probs;
  nlohmann::ordered_json chat_log_probs = nlohmann::ordered_json::array();
  bool begun = false;
};

class CompletionFormat final : public Format {
 public:
  // What an echoed prompt puts in front of its choices.
  struct Echo {
    int32_t first_token = 0;
    std::string text;
  };
  // echoes: of each prompt, or none. Choices of a prompt are consecutive sequences.
  CompletionFormat(const Tokenizer& tokenizer, bool log_probs, int64_t prompts, int64_t choices,
                   std::vector<Echo> echoes)
      : log_probs_(log_probs),
        choices_(static_cast<size_t>(choices)),
        echoes_(std::move(echoes)),
        collected_(static_cast<size_t>(prompts * choices), Collected(tokenizer)) {}

  nlohmann::ordered_json delta(const AnswerEvent& event) override {
    add(event);
    Collected& collected = collected_[event.sequence];
    if (collected.text.empty() && !event.stop && !log_probs_) return nullptr;
    nlohmann::ordered_json out = choice(event.sequence);
    collected.text.clear();
    return out;
  }
  void add(const AnswerEvent& event) override {
    Collected& collected = collected_[event.sequence];
    if (!std::exchange(collected.begun, true) && !echoes_.empty()) {
      const Echo& echo = echoes_[event.sequence / choices_];
      collected.text = echo.text;
      if (log_probs_) {
        collected.completion_log_probs.add_first(echo.first_token);
        for (const TokenLogProbs& token : event.prompt_log_probs) {
          collected.completion_log_probs.add(token);
        }
      }
    }
    collected.text += event.text;
    collected.stop = event.stop;
    if (event.log_probs) collected.completion_log_probs.add(*event.log_probs);
  }
  nlohmann::ordered_json choice(size_t sequence) override {
    Collected& collected = collected_[sequence];
    return {
        {"index", sequence},
        {"text", collected.text},
        {"logprobs", log_probs_ ? collected.completion_log_probs.take() : nlohmann::ordered_json()},
        {"finish_reason", finish_reason(collected.stop)}};
  }
  const char* object(bool) const override { return "text_completion"; }
  const char* id_prefix() const override { return "cmpl"; }

 private:
  bool log_probs_;
  size_t choices_;
  std::vector<Echo> echoes_;
  std::vector<Collected> collected_;
};

class ChatFormat final : public Format {
 public:
  // tools: how calls in the answers are read; null: there are none.
  ChatFormat(const Tokenizer& tokenizer, bool log_probs, int64_t choices,
             const ToolCallReader* tools = nullptr)
      : tokenizer_(tokenizer),
        log_probs_(log_probs),
        collected_(static_cast<size_t>(choices), Collected(tokenizer)) {
    if (tools == nullptr) return;
    calls_.assign(static_cast<size_t>(choices), Calls{*tools, {}});
    ids_.emplace(tools->form());
  }

  nlohmann::ordered_json delta(const AnswerEvent& event) override {
    Collected& collected = collected_[event.sequence];
    const bool first = !collected.begun;
    const std::vector<ToolCallPiece> pieces = read(event);
    if (collected.text.empty() && pieces.empty() && !event.stop && !log_probs_ && !first) {
      return nullptr;
    }
    nlohmann::ordered_json content = nlohmann::ordered_json::object();
    if (first) content["role"] = "assistant";
    if (first || !collected.text.empty()) content["content"] = std::exchange(collected.text, {});
    if (first) content["refusal"] = nullptr;
    for (const ToolCallPiece& piece : pieces) {
      nlohmann::ordered_json call = {{"index", piece.call}};
      if (!piece.name.empty()) {
        call["id"] = ids_->id(event.sequence, piece.call);
        call["type"] = "function";
        call["function"]["name"] = piece.name;
      }
      call["function"]["arguments"] = piece.arguments;
      content["tool_calls"].push_back(std::move(call));
    }
    return {{"index", event.sequence},
            {"delta", std::move(content)},
            {"logprobs", take_log_probs(collected)},
            {"finish_reason", finish_reason(event.stop, has_whole_calls(event.sequence))}};
  }
  void add(const AnswerEvent& event) override {
    for (ToolCallPiece& piece : read(event)) {
      std::vector<ToolCallPiece>& whole = calls_[event.sequence].whole;
      if (!piece.name.empty()) {
        whole.push_back(std::move(piece));
      } else {
        whole.back().arguments += piece.arguments;
      }
    }
  }
  nlohmann::ordered_json choice(size_t sequence) override {
    Collected& collected = collected_[sequence];
    nlohmann::ordered_json message = {
        {"role", "assistant"}, {"content", collected.text}, {"refusal", nullptr}};
    if (has_calls(sequence)) {
      if (collected.text.empty()) message["content"] = nullptr;
      for (const ToolCallPiece& call : calls_[sequence].whole) {
        message["tool_calls"].push_back(
            {{"id", ids_->id(sequence, call.call)},
             {"type", "function"},
             {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
      }
    }
    return {{"index", sequence},
            {"message", std::move(message)},
            {"logprobs", take_log_probs(collected)},
            {"finish_reason", finish_reason(collected.stop, has_whole_calls(sequence))}};
  }
  const char* object(bool chunk) const override {
    return chunk ? "chat.completion.chunk" : "chat.completion";
  }
  const char* id_prefix() const override { return "chatcmpl"; }

 private:
  struct Calls {
    ToolCallReader reader;
    std::vector<ToolCallPiece> whole;  // calls so far, of a whole answer
  };

  // Takes the event in: its text, or what of it is no call. Returns what is.
  std::vector<ToolCallPiece> read(const AnswerEvent& event) {
    Collected& collected = collected_[event.sequence];
    collected.begun = true;
    collected.stop = event.stop;
    if (event.log_probs) {
      collected.chat_log_probs.push_back(chat_log_prob(tokenizer_, *event.log_probs));
    }
    if (calls_.empty()) {
      collected.text += event.text;
      return {};
    }
    ToolCallReader::Found found =
        calls_[event.sequence].reader.push(event.text, event.stop.has_value());
    collected.text += found.text;
    return std::move(found.pieces);
  }
  bool has_calls(size_t sequence) const {
    return !calls_.empty() && calls_[sequence].reader.calls() > 0;
  }
  // That a client can make. A stop text may have cut off the last one.
  bool has_whole_calls(size_t sequence) const {
    return has_calls(sequence) && !calls_[sequence].reader.is_cut();
  }
  nlohmann::ordered_json take_log_probs(Collected& collected) const {
    if (!log_probs_) return nullptr;
    return {{"content", std::exchange(collected.chat_log_probs, nlohmann::ordered_json::array())}};
  }

  const Tokenizer& tokenizer_;
  bool log_probs_;
  std::vector<Collected> collected_;
  std::vector<Calls> calls_;  // of each choice; empty: they have none
  std::optional<ToolCallIds> ids_;
};

}  // namespace twell
