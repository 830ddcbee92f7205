// SPDX-License-Identifier: Apache-2.0
// Text from a prompt in text, as requests of a scheduler.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/grammar/grammar.h"
#include "twell/infer/scheduler.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct GenerateOptions {
  int64_t max_tokens = 256;  // most new tokens; the context is also a limit
  SamplerOptions sampler;
  std::vector<TokenBias> logit_bias;  // as in GenerationRequest
  // As in GenerationRequest; off, so that a text does not depend on earlier ones.
  bool share_beginning = false;
  // SchedulerOptions::speculate of generate().
  int64_t speculate = 0;
  bool begin_token = true;  // prepend the begin token of the tokenizer's template, if any
  bool log_probs = false;   // of the new tokens, at temperature 1 without penalties
  std::vector<std::string> stop_strings;
  std::optional<Grammar>
      grammar;  // what the text is drawn by, of a compiler told of all end tokens
  std::vector<int32_t> stop_tokens;  // in addition to the tokenizer's end-of-text token
  std::function<void(std::string_view text)> on_text;  // called when more text is final
  const std::atomic<bool>* cancel = nullptr;           // once true, stops after the current token
};

struct Generation {
  std::string text;              // without the prompt
  std::vector<int32_t> ids;      // without the prompt
  std::vector<float> log_probs;  // of ids, if asked for
  int64_t prompt_tokens = 0;
  StopReason reason = StopReason::kMaxTokens;
  double prefill_seconds = 0.0;  // as in Usage
  double decode_seconds = 0.0;
  int64_t drafted = 0, accepted = 0;
};

// The tokens of a prompt, with the begin token of the tokenizer's template first, unless
// begin_token is false. A prompt without any token starts with the end-of-text token, as documents
// do in training. InputError when there is no such token, or when the model's vocabulary is smaller
// than the tokenizer's.
std::vector<int32_t> prompt_ids(const ModelConfig& config, const Tokenizer& tokenizer,
                                std::string_view prompt, bool begin_token = true);

// Every token that ends a text according to a checkpoint's config.json, generation_config.json
// ("eos_token_id") and tokenizer_config.json ("eos_token"), and those that `named` names.
// InputError names the file and the fault, or the name that is no token.
std::vector<int32_t> stop_tokens(const std::filesystem::path& checkpoint, const ModelConfig& config,
                                 const Tokenizer& tokenizer,
                                 const std::vector<std::string>& named = {});

// The prompt as a request whose text and tokens are collected; calls on_done at its end, on the
// thread that steps the scheduler.
using OnDone = std::function<void(int64_t request, Generation generation)>;
GenerationRequest text_request(const ModelConfig& config, const Tokenizer& tokenizer,
                               std::string_view prompt, const GenerateOptions& options,
                               OnDone on_done);

// Runs a single request. InputError kNoTokenReason.
Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options);

}  // namespace twell
