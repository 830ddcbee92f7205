// SPDX-License-Identifier: Apache-2.0
// OpenAI's completions and chat completions as data: request bodies in, generation requests out;
// generated tokens in, response bodies out. Pure functions, without a network or a model.
//
// In: JSON texts of untrusted clients, UTF-8. A body that cannot be answered is an ApiError whose
// message names the field, its value and what is allowed. A field that this server does not know is
// an error, because ignoring it would give another answer than the client asked for.
// A request's "response_format", "json_schema" and "grammar" become a grammar, its "tools" what
// tool_calls.h takes.
// Source: OpenAI's API reference (completions, chat completions); top_k, min_p, ignore_eos,
// add_special_tokens and continuous_usage_stats as in vLLM, logit_bias as a list and of texts,
// json_schema, and json_object with a schema as in llama.cpp.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "twell/grammar/grammar.h"
#include "twell/infer/scheduler.h"
#include "twell/serve/tool_calls.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// A failure that the client is told about.
class ApiError : public std::runtime_error {
 public:
  ApiError(int status_in, const std::string& message, std::string param_in = {},
           std::string code_in = {})
      : std::runtime_error(message),
        status(status_in),
        param(std::move(param_in)),
        code(std::move(code_in)) {}

  int status;
  std::string param;  // the field at fault; empty: none
  std::string code;   // "model_not_found", "context_length_exceeded", ...; empty: none
};

// {"error": {"message", "type", "param", "code"}}
nlohmann::ordered_json error_json(const ApiError& error);

// An entry of "logit_bias": a token's id, or a text, whose tokens are meant.
struct BiasWish {
  std::variant<int32_t, std::string> token;
  float bias = 0.0f;
};

// What both kinds of completions have in common.
struct AnswerOptions {
  std::string model;                  // empty: the server's
  std::optional<int64_t> max_tokens;  // nullopt: the default of the kind
  SamplerOptions sampler;             // choice i of a prompt draws with seed + i
  std::vector<BiasWish> logit_bias;   // of a token's entries the last one counts
  bool seeded = false;                // whether the request has a seed
  std::vector<std::string> stop;
  int64_t choices = 1;               // per prompt
  std::optional<int64_t> log_probs;  // of the tokens and of so many most likely ones
  bool ignore_end_of_text = false;
  std::optional<GrammarText> grammar;  // that answers are drawn by, as the field says
  std::string grammar_field;
  bool stream = false;
  bool stream_usage = false;             // a last chunk with the usage
  bool stream_continuous_usage = false;  // the usage in every chunk
};

struct CompletionRequest {
  AnswerOptions options;
  std::vector<std::variant<std::string, std::vector<int32_t>>> prompts;  // at least one
  bool echo = false;
  bool begin_token = true;  // in front of prompts that are texts
  std::string suffix;       // what follows the text that is wanted; empty: nothing is known of it
};

struct ChatRequest {
  AnswerOptions options;
  // A list of objects with texts "role" and "content"; those of calls have "tool_calls", whose
  // arguments are objects, and those of results "tool_call_id".
  std::string messages_json;
  std::string tools_json;      // in the client's order of keys, for the template; empty: none
  std::string variables_json;  // an object with further variables of the template; empty: none
  std::vector<Tool> tools;     // of tools_json, those that may be called
  ToolCallLimits calls;
};

// Instructions and input as the messages of a chat; its tools in the chat's form.
struct ResponseRequest : ChatRequest {
  std::string settings_json;  // what the response repeats of the request
};

struct TokenizeRequest {
  std::string model;
  std::optional<std::string> prompt;         // either this
  std::optional<std::string> messages_json;  // or this, with what stands beside it in a chat
  std::string tools_json, variables_json;
  bool add_generation_prompt = true;
  bool begin_token = true;
};

// most_sequences: upper bound of prompts times choices.
CompletionRequest parse_completion(std::string_view body, int64_t most_sequences);
ChatRequest parse_chat(std::string_view body, int64_t most_sequences);
ResponseRequest parse_response(std::string_view body, int64_t most_sequences);
TokenizeRequest parse_tokenize(std::string_view body);
std::vector<int32_t> parse_detokenize(std::string_view body);

// Adds token by token what a completion's "logprobs" holds; take() returns what is new.
class CompletionLogProbs {
 public:
  explicit CompletionLogProbs(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The first token of a prompt: it has no log-probability.
  void add_first(int32_t id);
  void add(const TokenLogProbs& token);
  nlohmann::ordered_json take();

 private:
  void add_token(int32_t id);

  const Tokenizer& tokenizer_;
  nlohmann::ordered_json tokens_ = nlohmann::ordered_json::array(), values_ = tokens_,
                         tops_ = tokens_, offsets_ = tokens_;
  int64_t offset_ = 0;  // characters of all tokens so far
};

// An entry of the "content" of a chat completion's "logprobs".
nlohmann::ordered_json chat_log_prob(const Tokenizer& tokenizer, const TokenLogProbs& token);

// "stop", "length", "tool_calls" where the answer has calls, or null while there is none.
nlohmann::ordered_json finish_reason(const std::optional<StopReason>& stop, bool calls = false);

nlohmann::ordered_json usage_json(int64_t prompt_tokens, int64_t tokens, int64_t cached_tokens);

// The text of a JSON value; bytes that are not UTF-8 become U+FFFD.
std::string to_text(const nlohmann::ordered_json& json);

}  // namespace twell
