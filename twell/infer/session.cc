// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session.h"

#include <limits>

#include "twell/base/error.h"

namespace twell {

int64_t Session::checked_slots(const SessionOptions& options) {
  TWELL_REQUIRE(options.slots > 0, "a session needs at least one sequence, got {}", options.slots);
  return options.slots;
}

int64_t Session::checked_capacity(const SessionOptions& options, const ModelConfig& config) {
  TWELL_REQUIRE(options.capacity >= 0 && options.capacity <= config.context,
                "a sequence holds at most the model's context of {} tokens, got {}", config.context,
                options.capacity);
  return options.capacity == 0 ? config.context : options.capacity;
}

int64_t Session::checked_cache_bytes(const SessionOptions& options) {
  TWELL_REQUIRE(options.cache_bytes >= 0, "a cache of {} bytes", options.cache_bytes);
  return options.cache_bytes;
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

int32_t Session::draw_from(std::span<const float> logits, const Draw& draw) {
  const size_t vocab = draw.vocab == 0 ? logits.size() : static_cast<size_t>(draw.vocab);
  return sample(logits.first(vocab), draw.sampler, draw.stream, draw.index);
}

int64_t Session::start(int64_t slot, std::span<const int32_t>) {
  clear(slot);
  return 0;
}

bool Session::reserve(int64_t slot, int64_t tokens) { return length(slot) + tokens <= capacity(); }

int64_t Session::free_tokens() const { return std::numeric_limits<int64_t>::max(); }

CacheUse Session::cache_use() const {
  CacheUse use{.block_tokens = capacity(), .blocks = slots()};
  for (int64_t slot = 0; slot < slots(); ++slot) use.used += length(slot) > 0;
  return use;
}

}  // namespace twell
