// SPDX-License-Identifier: Apache-2.0
// Text out of prompts, any number of them: continuous batching.
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

// The tokens that a prompt's text starts a sequence with, behind the token that the tokenizer's
// template begins texts with unless begin_token is false. Where that gives none, the sequence
// starts from the end-of-text token, as documents do in training. InputError when there is none, or
// the model has fewer tokens than the tokenizer.
std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer,
                                std::string_view prompt, bool begin_token = true);

// Generates for many requests over the slots of one session. A request waits for a slot, which is
// cleared for it, and leaves it as soon as its text ends; the others go on meanwhile: prompts are
// fed in pieces between their tokens. A request's
// random numbers are those of its own seed, so that it gives what it gives alone, but for ties that
// the order of additions in a batch decides.
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
  // The request ends in the next step with the text it has by then. No effect once it has ended.
  // For the thread that calls step(); others set GenerateOptions::cancel.
  void cancel(int64_t request);
  // Requests that wait take the slots that are free. Their prompts are fed, while others grow no
  // more than Session::prefill_tokens() of them, and every sequence whose prompt is through grows
  // by a token. False when no request is left.
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
