// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session.h"

#include "twell/base/error.h"

namespace twell {

int64_t Session::checked_slots(const SessionOptions& options) {
  TWELL_REQUIRE(options.slots > 0, "a session needs at least one sequence, got {}", options.slots);
  return options.slots;
}

int64_t Session::checked_capacity(const SessionOptions& options, const ModelConfig& config) {
  TWELL_REQUIRE(options.capacity >= 0 && options.capacity <= config.max_sequence(),
                "a sequence holds at most the model's context of {} tokens, got {}",
                config.max_sequence(), options.capacity);
  return options.capacity == 0 ? config.max_sequence() : options.capacity;
}

int64_t Session::checked_prefill_tokens(const SessionOptions& options, int64_t suits) {
  TWELL_REQUIRE(options.prefill_tokens >= 0,
                "prompts go through the layers in pieces of a positive number of tokens, got {}",
                options.prefill_tokens);
  return options.prefill_tokens == 0 ? suits : options.prefill_tokens;
}

void Session::require_room(int64_t slot, std::span<const int32_t> ids) const {
  TWELL_REQUIRE(!ids.empty(), "nothing to append: a sequence starts with at least one token");
  const int64_t total = length(slot) + std::ssize(ids);
  TWELL_REQUIRE(total <= capacity(),
                "{} tokens do not fit the context of {}: shorten the prompt or ask for fewer",
                total, capacity());
}

void Session::append_and_draw(std::span<const Prompt> prompts, std::span<const Draw> draws,
                              std::span<int32_t> next) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::span<const float> logits = append(prompts[i].slot, prompts[i].ids);
    const size_t vocab = draws[i].vocab == 0 ? logits.size() : static_cast<size_t>(draws[i].vocab);
    next[i] = sample(logits.first(vocab), draws[i].sampler, draws[i].stream, draws[i].index);
  }
}

void Session::decode_and_draw(std::span<const int64_t> slots, std::span<const int32_t> ids,
                              std::span<const Draw> draws, std::span<int32_t> next) {
  const ConstMatrixF logits = decode(slots, ids);
  for (size_t i = 0; i < slots.size(); ++i) {
    const Draw& draw = draws[i];
    const auto vocab = static_cast<size_t>(draw.vocab == 0 ? logits.cols : draw.vocab);
    next[i] =
        sample({logits.row(static_cast<int64_t>(i)), vocab}, draw.sampler, draw.stream, draw.index);
  }
}

}  // namespace twell
