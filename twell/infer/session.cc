// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {

Session::Session(const CachePlan& plan)
    : plan_(plan), blocks_(plan.blocks, plan.block_tokens, plan.slots) {}

Session::CachePlan Session::full_cache(const SessionOptions& options, const ModelConfig& config) {
  TWELL_REQUIRE(options.slots > 0, "a session needs at least one sequence, got {}", options.slots);
  TWELL_REQUIRE(options.capacity >= 0 && options.capacity <= config.context,
                "a sequence holds at most the model's context of {} tokens, got {}", config.context,
                options.capacity);
  TWELL_REQUIRE(options.draft_tokens >= 0, "a session for {} guessed tokens", options.draft_tokens);
  TWELL_REQUIRE(options.cache_bytes >= 0, "a cache of {} bytes", options.cache_bytes);
  TWELL_REQUIRE(options.cache.block_tokens >= 1, "a block of {} tokens",
                options.cache.block_tokens);
  CachePlan plan{.slots = options.slots,
                 .capacity = options.capacity == 0 ? config.context : options.capacity,
                 .block_tokens = options.cache.block_tokens,
                 .draft_tokens = options.draft_tokens};
  plan.blocks = plan.slots * plan.blocks_each();
  return plan;
}

Session::CachePlan Session::cache_within(CachePlan plan, int64_t bytes, int64_t block_bytes) {
  TWELL_REQUIRE(bytes >= block_bytes,
                "a cache of {} bytes is smaller than a block of {} tokens, {} bytes", bytes,
                plan.block_tokens, block_bytes);
  plan.blocks = std::min(plan.blocks, bytes / block_bytes);
  plan.capacity = std::min(plan.capacity, plan.blocks * plan.block_tokens);
  return plan;
}

int64_t Session::checked_prefill_tokens(const SessionOptions& options, int64_t suits) {
  TWELL_REQUIRE(options.prefill_tokens >= 0,
                "prompts go through the layers in pieces of a positive number of tokens, got {}",
                options.prefill_tokens);
  return options.prefill_tokens == 0 ? suits : options.prefill_tokens;
}

void Session::make_room(int64_t slot, std::span<const int32_t> ids) {
  TWELL_REQUIRE(!ids.empty(), "nothing to append: a sequence starts with at least one token");
  const int64_t total = length(slot) + std::ssize(ids);
  TWELL_REQUIRE(total <= capacity(),
                "{} tokens do not fit the context of {}: shorten the prompt or ask for fewer",
                total, capacity());
  TWELL_REQUIRE(reserve(slot, std::ssize(ids)),
                "the cache has no room for {} more tokens: {} of its {} blocks of {} are in use",
                ids.size(), blocks_.used(), blocks_.blocks(), blocks_.block_tokens());
}

void Session::make_room(std::span<const NewTokens> tokens, std::span<const Draw> draws) {
  size_t rows = 0;
  int64_t drafts = 0;
  for (const NewTokens& one : tokens) {
    make_room(one.slot, one.ids);
    rows += 1 + one.drafts.size();
    drafts += std::ssize(one.drafts);
    if (one.drafts.empty()) continue;
    TWELL_CHECK(one.ids.size() == 1 && one.ids[0] >= 0 && one.targets.empty(),
                "guesses behind {} tokens, of which the first is {}", one.ids.size(), one.ids[0]);
    TWELL_CHECK(reserve(one.slot, 1 + std::ssize(one.drafts)), "no room for {} guessed tokens",
                one.drafts.size());
  }
  TWELL_CHECK(std::ssize(tokens) <= slots() && drafts <= draft_tokens() && rows == draws.size(),
              "{} sequences with {} guessed tokens and {} draws, in a session for {} and {}",
              tokens.size(), drafts, draws.size(), slots(), draft_tokens());
}

std::vector<ForwardSequence> Session::one_each(std::span<const int64_t> slots,
                                               std::span<const int32_t> ids) {
  TWELL_CHECK(slots.size() == ids.size() && !slots.empty() && std::ssize(slots) <= this->slots(),
              "decode takes one token for each of 1..{} sequences, got {} slots and {} tokens",
              this->slots(), slots.size(), ids.size());
  std::vector<ForwardSequence> sequences;
  for (size_t i = 0; i < slots.size(); ++i) {
    make_room(slots[i], ids.subspan(i, 1));
    sequences.push_back({.tokens = 1, .slot = slots[i]});
  }
  return sequences;
}

int32_t Session::draw_from(std::span<float> logits, const Draw& draw, Context& ctx) {
  const size_t vocab = draw.vocab == 0 ? logits.size() : static_cast<size_t>(draw.vocab);
  std::vector<uint32_t> mask;
  if (draw.filter != nullptr) {
    mask.resize(static_cast<size_t>(token_mask_words(static_cast<int64_t>(vocab))));
    write_mask(draw, kNoToken, mask);
  }
  return sample_in_place(logits.first(vocab), draw.sampler, draw.stream, draw.index, draw.seen,
                         &ctx, mask);
}

void Session::write_mask(const Draw& draw, int32_t before, std::span<uint32_t> mask) {
  if (before != kNoToken) draw.filter->accept(draw.index - 1, before);
  draw.filter->allowed(mask);
}

void Session::appended(int64_t call, std::span<const NewTokens> tokens) {
  for (const NewTokens& one : tokens) {
    if (one.ids[0] >= 0) {
      appended(one.slot, one.ids);
    } else {
      TWELL_CHECK(one.ids.size() == 1, "{} tokens, of which the first is not known",
                  one.ids.size());
      unknown_.push_back({.call = call - 1, .row = int64_t{-1} - one.ids[0], .slot = one.slot});
    }
  }
}

void Session::known(int64_t call, std::span<const int32_t> next) {
  for (const Unknown& one : unknown_) {
    if (one.call == call) appended(one.slot, next.subspan(static_cast<size_t>(one.row), 1));
  }
  // Calls before this one are not asked any more.
  std::erase_if(unknown_, [&](const Unknown& one) { return one.call <= call; });
}

int64_t Session::start(int64_t slot, std::span<const int32_t> ids) {
  blocks_.release(slot);
  const int64_t held = blocks_.start(slot, ids);
  show(slot, blocks_.table(slot), held);
  return held;
}

void Session::keep(int64_t slot, std::span<const int32_t> drafts) {
  appended(slot, drafts);
  blocks_.trim(slot);
  show(slot, blocks_.table(slot), length(slot));
}

bool Session::reserve(int64_t slot, int64_t tokens) {
  if (length(slot) + tokens > capacity()) return false;
  const size_t before = blocks_.table(slot).size();
  if (!blocks_.reserve(slot, tokens)) return false;
  if (blocks_.table(slot).size() != before) show(slot, blocks_.table(slot), length(slot));
  return true;
}

void Session::clear(int64_t slot) {
  blocks_.release(slot);
  show(slot, {}, 0);
}

void Session::discard(int64_t slot) {
  blocks_.discard(slot);
  show(slot, {}, 0);
}

double Session::nnz_per_token() {
  const std::vector<ActiveNeurons> layers = active_neurons();
  double sum = 0.0;
  for (const ActiveNeurons& layer : layers) sum += layer.per_token;
  return layers.empty() ? 0.0 : sum / static_cast<double>(layers.size());
}

CacheUse Session::cache_use() const {
  return {.block_tokens = blocks_.block_tokens(),
          .blocks = blocks_.blocks(),
          .used = blocks_.used(),
          .cached = blocks_.cached()};
}

}  // namespace twell
