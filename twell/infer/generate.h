// SPDX-License-Identifier: Apache-2.0
// Text out of a prompt.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "twell/data/tokenizer.h"
#include "twell/infer/sampler.h"
#include "twell/infer/session.h"

namespace twell {

struct GenerateOptions {
  int64_t max_tokens = 256;  // new tokens at most; the context is a limit too
  SamplerOptions sampler;
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
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
};

// Generates in slot 0 of the session, which is cleared first. An empty prompt starts from the
// end-of-text token, as documents do in training. InputError when the prompt leaves no room.
Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options);

}  // namespace twell
