// SPDX-License-Identifier: Apache-2.0
// OpenAI's Responses API as data: a request's generated tokens in; the response, or the events of
// its stream, out. Items are messages of text and calls of tools, in the order of the answer;
// nothing is kept for later requests.
// Source: OpenAI's API reference (responses, streaming events).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/serve/answers.h"
#include "twell/serve/openai.h"
#include "twell/serve/tool_calls.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

class ResponseFormat {
 public:
  // number: identifies the response; model: the name that it tells; tools: how calls in the answer
  // are read; null: there are none.
  ResponseFormat(const Tokenizer& tokenizer, const ResponseRequest& request, std::string number,
                 std::string model, int64_t created, const ToolCallReader* tools = nullptr);

  // The response as it is now.
  nlohmann::ordered_json response() const;
  // The event tells what the model did; `cached` prompt tokens were not computed.
  void add(const AnswerEvent& event) { take(event, nullptr); }
  void fail(const ApiError& error);

  // Server-sent events: those in front of the first token, those of a model's event, and those of a
  // failure. The last of a stream is "response.completed", ".incomplete" or ".failed".
  std::string begin();
  std::string next(const AnswerEvent& event);
  std::string failed(const ApiError& error);

 private:
  // A message, or a call if it has a name.
  struct Item {
    std::string id, call_id, name;
    std::string text;  // of the message, or the call's arguments
    nlohmann::ordered_json log_probs = nlohmann::ordered_json::array();
    const char* status = "in_progress";
  };

  // stream: events are added to it; null: there is none.
  void take(const AnswerEvent& event, std::string* stream);
  void add_text(std::string_view text, std::string* stream);
  void add_piece(const ToolCallPiece& piece, std::string* stream);
  void open(Item item, std::string* stream);
  void close(const char* status, std::string* stream);
  bool in_message() const { return is_open_ && items_.back().name.empty(); }

  void write(std::string* stream, std::string_view type, nlohmann::ordered_json fields);
  nlohmann::ordered_json place(bool content) const;  // of the last item, or of its content
  static nlohmann::ordered_json part(const Item& item);
  static nlohmann::ordered_json json(const Item& item);
  bool ended() const { return status_ != "in_progress"; }

  const Tokenizer& tokenizer_;
  nlohmann::ordered_json settings_;  // of the request, as the response repeats them
  bool log_probs_;
  std::string number_, model_;
  int64_t created_;
  std::optional<ToolCallReader> tools_;
  std::optional<ToolCallIds> call_ids_;
  std::string status_ = "in_progress";
  std::vector<Item> items_;
  bool is_open_ = false;  // the last item
  // Of tokens whose text may yet be a call's.
  nlohmann::ordered_json waiting_log_probs_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json error_;
  Usage usage_;
  int64_t events_ = 0;
};

}  // namespace twell
