// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/generate.h"

#include <algorithm>
#include <chrono>

#include "twell/base/error.h"
#include "twell/infer/text_stream.h"

namespace twell {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_stop_token(const GenerateOptions& options, int32_t id) {
  return std::find(options.stop_tokens.begin(), options.stop_tokens.end(), id) !=
         options.stop_tokens.end();
}

std::vector<int32_t> prompt_ids(const Session& session, const Tokenizer& tokenizer,
                                std::string_view prompt) {
  std::vector<int32_t> ids = tokenizer.encode(prompt);
  if (ids.empty()) {
    TWELL_REQUIRE(tokenizer.eos_token() >= 0,
                  "the prompt is empty and the tokenizer has no end-of-text token to start from");
    ids.push_back(tokenizer.eos_token());
  }
  const int64_t vocab = session.config().vocab_size;
  for (const int32_t id : ids) {
    TWELL_REQUIRE(id < vocab, "the tokenizer gives token {}, but the model has {} tokens", id,
                  vocab);
  }
  TWELL_REQUIRE(std::ssize(ids) < session.capacity(),
                "the prompt has {} tokens; the context of {} leaves no room for a new one",
                ids.size(), session.capacity());
  return ids;
}

}  // namespace

std::string_view stop_reason_name(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText:
      return "end of text";
    case StopReason::kStopString:
      return "stop string";
    case StopReason::kMaxTokens:
      return "token limit";
    case StopReason::kContextFull:
      return "context full";
    case StopReason::kCancelled:
      return "cancelled";
  }
  TWELL_CHECK(false, "unknown stop reason {}", static_cast<int>(reason));
}

Generation generate(Session& session, const Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options) {
  TWELL_REQUIRE(options.max_tokens > 0, "the number of tokens to generate must be positive, got {}",
                options.max_tokens);
  options.sampler.validate();
  const std::vector<int32_t> ids = prompt_ids(session, tokenizer, prompt);

  Generation result;
  result.prompt_tokens = std::ssize(ids);
  TextStream stream(options.stop_strings);
  const auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    result.text += text;
    if (options.on_text) options.on_text(text);
  };

  session.clear(0);
  const Clock::time_point start = Clock::now();
  // A model may have more rows than the tokenizer has tokens (padding): those are never drawn.
  const Draw draw{options.sampler, std::min(tokenizer.vocab_size(), session.config().vocab_size)};
  int32_t id = session.append_and_draw(0, ids, draw, {});
  result.prefill_seconds = seconds_since(start);
  const Clock::time_point decode_start = Clock::now();
  for (DrawPosition at{.index = 1};; ++at.index) {
    if (id == tokenizer.eos_token() || is_stop_token(options, id)) {
      result.reason = StopReason::kEndOfText;
      break;
    }
    result.ids.push_back(id);
    emit(stream.push(tokenizer.token_bytes(id)));
    if (stream.stopped()) {
      result.reason = StopReason::kStopString;
    } else if (options.cancel != nullptr && *options.cancel) {
      result.reason = StopReason::kCancelled;
    } else if (std::ssize(result.ids) == options.max_tokens) {
      result.reason = StopReason::kMaxTokens;
    } else if (session.length(0) == session.capacity()) {
      result.reason = StopReason::kContextFull;
    } else {
      const int64_t slot = 0;
      session.decode_and_draw({&slot, 1}, {&id, 1}, draw, {&at, 1}, {&id, 1});
      continue;
    }
    break;
  }
  emit(stream.finish());
  result.decode_seconds = seconds_since(decode_start);
  return result;
}

}  // namespace twell
