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
  int64_t max_tokens = 256;  // most new tokens; the context is also a limit
  SamplerOptions sampler;
  bool begin_token = true;  // prepend the begin token of the tokenizer's template, if any
  std::vector<std::string> stop_strings;
  std::vector<int32_t> stop_tokens;  // in addition to the tokenizer's end-of-text token
  std::function<void(std::string_view text)> on_text;  // called when more text is final
  const std::atomic<bool>* cancel = nullptr;           // once true, stops after the current token
};

enum class StopReason { kEndOfText, kStopString, kMaxTokens, kContextFull, kCancelled };
std::string_view stop_reason_name(StopReason reason);

struct Generation {
  std::string text;          // without the prompt
  std::vector<int32_t> ids;  // without the prompt
  int64_t prompt_tokens = 0;
  StopReason reason = StopReason::kMaxTokens;
  double prefill_seconds = 0.0;  // of the prompts processed in the same passes as this one
  double decode_seconds = 0.0;
};

// The tokens of a prompt, with the begin token of the tokenizer's template in front unless
// begin_token is false. A prompt without any token starts with the end-of-text token, as documents
// do in training. InputError when there is no such token, or when the model's vocabulary is smaller
// than the tokenizer's.
std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer,
                                std::string_view prompt, bool begin_token = true);

// Generates for many requests in the slots of one session. A request waits for a free slot and
// releases it when its text ends. Prompts are fed in pieces between the decode steps of other
// requests. Each request draws from its own seed, so it gives the same text as alone, unless a
// different order of additions in a batch decides between nearly equal logits.
class Generator {
 public:
  // Called by step() for each finished request; it may submit new requests.
  using OnDone = std::function<void(int64_t request, Generation generation)>;

  // The session and the tokenizer must outlive this object.
  Generator(Session& session, const Tokenizer& tokenizer, OnDone on_done);
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // Returns the request's number: 0, 1, 2, ... InputError when the options are impossible or the
  // prompt leaves no room for a token.
  int64_t submit(std::string_view prompt, GenerateOptions options);
  // Ends the request in the next step with the text it has then; no effect on a finished request.
  // Call it only on the thread that calls step(); other threads set GenerateOptions::cancel.
  void cancel(int64_t request);
  // Assigns free slots to waiting requests, feeds prompts (at most Session::prefill_tokens() tokens
  // while other sequences are decoding), and adds a token to every sequence whose prompt is
  // complete. Returns false when no request is left.
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
  std::vector<std::unique_ptr<Request>> starting_;  // have a slot; prompts incomplete
  std::vector<std::unique_ptr<Request>> running_;
  std::vector<int64_t> free_slots_;
};

// Runs a single request.
Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options);

}  // namespace twell
