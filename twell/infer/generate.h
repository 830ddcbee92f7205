// SPDX-License-Identifier: Apache-2.0
// Generates text from any number of prompts with continuous batching.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twell/infer/sampler.h"
#include "twell/infer/session.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct GenerateOptions {
  int64_t max_tokens = 256;  // new tokens at most; the context is a limit too
  SamplerOptions sampler;
  bool begin_token = true;  // in front of the prompt, where the tokenizer's template has one
  std::vector<std::string> stop_strings;
  std::vector<int32_t> stop_tokens;                    // besides the tokenizer's end-of-text token
  std::function<void(std::string_view text)> on_text;  // called as text becomes final
  const std::atomic<bool>* cancel = nullptr;  // stop after the current token once it is true
};

enum class StopReason { kEndOfText, kStopString, kMaxTokens, kContextFull, kCancelled };
std::string_view stop_reason_name(StopReason reason);

struct Generation {
  std::string text;          // without the prompt
  std::vector<int32_t> ids;  // without the prompt
  int64_t prompt_tokens = 0;
  StopReason reason = StopReason::kMaxTokens;
  double prefill_seconds = 0.0;  // of the prompts that went through the layers with this one
  double decode_seconds = 0.0;
};

// The tokens of a prompt's text, after the token with which the tokenizer's template begins texts
// unless begin_token is false. A prompt without any token starts from the end-of-text token, as
// documents do in training. InputError when there is none, or the model has fewer tokens than the
// tokenizer.
std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer,
                                std::string_view prompt, bool begin_token = true);

// Generates for many requests over the slots of one session. A request waits for a slot and leaves
// it as soon as its text ends. Prompts are fed in pieces between the tokens of the other requests.
// A request draws random numbers from its own seed, so that it gives the same text as alone, except
// where the order of additions in a batch decides between equal logits.
class Generator {
 public:
  // Called by step() for each request that has ended; it may submit further ones.
  using OnDone = std::function<void(int64_t request, Generation generation)>;

  // The session and the tokenizer must outlive it.
  Generator(Session& session, const Tokenizer& tokenizer, OnDone on_done);
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // Returns the request's number: 0, 1, 2, ... InputError when the options are impossible or the
  // prompt leaves no room for a token.
  int64_t submit(std::string_view prompt, GenerateOptions options);
  // Ends the request in the next step with the text it has by then; no effect once it has ended.
  // Only for the thread that calls step(); others set GenerateOptions::cancel.
  void cancel(int64_t request);
  // Waiting requests take free slots. Prompts are fed, at most Session::prefill_tokens() of their
  // tokens while others grow, and every sequence whose prompt has been fed grows by a token. False
  // when no request is left.
  bool step();

 private:
  using Clock = std::chrono::steady_clock;
  struct Request;

  void end_cancelled();
  void admit_waiting();
  void feed_prompts();
  void grow_running();
  bool takes(Request& request, int32_t id);
  void end(std::unique_ptr<Request> request);
  Draw draw_of(const Request& request) const;

  Session& session_;
  const Tokenizer& tokenizer_;
  OnDone on_done_;
  int64_t submitted_ = 0;
  std::deque<std::unique_ptr<Request>> waiting_;
  std::vector<std::unique_ptr<Request>> starting_;  // in slots; their prompts are not all fed
  std::vector<std::unique_ptr<Request>> running_;
  std::vector<int64_t> free_slots_;
};

// One request by itself.
Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options);

}  // namespace twell
