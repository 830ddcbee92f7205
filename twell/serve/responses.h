// SPDX-License-Identifier: Apache-2.0
// OpenAI's Responses API as data: a request's generated tokens in; the response, or the events of
// its stream, out. One message of text; nothing is kept for later requests.
// Source: OpenAI's API reference (responses, streaming events).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "twell/serve/answers.h"
#include "twell/serve/openai.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

class ResponseFormat {
 public:
  // number: identifies the response; model: the name that it tells.
  ResponseFormat(const Tokenizer& tokenizer, const ResponseRequest& request, std::string number,
                 std::string model, int64_t created);

  // The response as it is now.
  nlohmann::ordered_json response() const;
  // The event tells what the model did; `cached` prompt tokens were not computed.
  void add(const AnswerEvent& event);
  void fail(const ApiError& error);

  // Server-sent events: those in front of the first token, those of a model's event, and those of a
  // failure. The last of a stream is "response.completed", ".incomplete" or ".failed".
  std::string begin();
  std::string next(const AnswerEvent& event);
  std::string failed(const ApiError& error);

 private:
  std::string event(std::string_view type, nlohmann::ordered_json fields);
  nlohmann::ordered_json part() const;
  nlohmann::ordered_json item() const;
  bool ended() const { return status_ != "in_progress"; }

  const Tokenizer& tokenizer_;
  nlohmann::ordered_json settings_;  // of the request, as the response repeats them
  bool log_probs_;
  std::string number_, model_;
  int64_t created_;
  std::string status_ = "in_progress", text_;
  nlohmann::ordered_json all_log_probs_ = nlohmann::ordered_json::array(), error_;
  Usage usage_;
  int64_t events_ = 0;
};

}  // namespace twell
