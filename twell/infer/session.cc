// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {
namespace {

int64_t checked_slots(const SessionOptions& options) {
  TWELL_REQUIRE(options.slots > 0, "a session needs at least one sequence, got {}", options.slots);
  return options.slots;
}

int64_t checked_capacity(const SessionOptions& options, const ModelConfig& config) {
  TWELL_REQUIRE(options.capacity >= 0 && options.capacity <= config.max_sequence(),
                "a sequence holds at most the model's context of {} tokens, got {}",
                config.max_sequence(), options.capacity);
  return options.capacity == 0 ? config.max_sequence() : options.capacity;
}

}  // namespace

Session::Session(Context& ctx, const Model& model, const SessionOptions& options)
    : ctx_(ctx),
      model_(model),
      state_(model.config, options.ffn),
      cache_(model.config, checked_slots(options), checked_capacity(options, model.config)),
      hidden_(std::max(std::min(kPrefillTokens, cache_.capacity()), options.slots) *
              model.config.width),
      logits_(options.slots * model.config.vocab_size) {}

std::span<const float> Session::append(int64_t slot, std::span<const int32_t> ids) {
  TWELL_REQUIRE(!ids.empty(), "nothing to append: a sequence starts with at least one token");
  const int64_t total = cache_.length(slot) + std::ssize(ids);
  TWELL_REQUIRE(total <= cache_.capacity(),
                "{} tokens do not fit the context of {}: shorten the prompt or ask for fewer",
                total, cache_.capacity());
  int64_t last = 0;  // tokens in the last piece
  for (size_t begin = 0; begin < ids.size(); begin += kPrefillTokens) {
    const auto piece = ids.subspan(begin, std::min<size_t>(kPrefillTokens, ids.size() - begin));
    last = std::ssize(piece);
    const ForwardSequence sequence{.tokens = last, .slot = slot};
    forward(ctx_, model_, state_,
            {.ids = piece,
             .sequences = {&sequence, 1},
             .cache = &cache_,
             .hidden = hidden_.matrix(last, model_.config.width)});
  }
  const MatrixF hidden = hidden_.matrix(last, model_.config.width);
  const MatrixF out = logits_.matrix(1, model_.config.vocab_size);
  logits(ctx_, model_, hidden.slice_rows(last - 1, 1), out);
  return {out.data, static_cast<size_t>(out.cols)};
}

ConstMatrixF Session::decode(std::span<const int64_t> slots, std::span<const int32_t> ids) {
  TWELL_CHECK(slots.size() == ids.size() && !slots.empty() && std::ssize(slots) <= cache_.slots(),
              "decode takes one token for each of 1..{} sequences, got {} slots and {} tokens",
              cache_.slots(), slots.size(), ids.size());
  std::vector<ForwardSequence> sequences;
  for (const int64_t slot : slots) sequences.push_back({.tokens = 1, .slot = slot});
  const MatrixF hidden = hidden_.matrix(std::ssize(ids), model_.config.width);
  forward(ctx_, model_, state_,
          {.ids = ids, .sequences = sequences, .cache = &cache_, .hidden = hidden});
  const MatrixF out = logits_.matrix(std::ssize(ids), model_.config.vocab_size);
  logits(ctx_, model_, hidden, out);
  return out;
}

void Session::clear(int64_t slot) { cache_.set_length(slot, 0); }

}  // namespace twell
