// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session_cpu.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {
namespace {

// Limits the memory for activations.
constexpr int64_t kPrefillTokens = 512;

}  // namespace

// At most the blocks that all slots need at full capacity.
SessionCpu::CachePlan SessionCpu::cache_plan(const ModelConfig& config,
                                             const SessionOptions& options) {
  const int64_t block_tokens = options.cache.block_tokens;
  TWELL_REQUIRE(block_tokens >= 1, "a block of {} tokens", block_tokens);
  const int64_t capacity = checked_capacity(options, config), slots = checked_slots(options);
  const int64_t each = (capacity + block_tokens - 1) / block_tokens;
  if (checked_cache_bytes(options) == 0) return {slots * each, capacity};
  const int64_t block_bytes = KvCache::block_bytes(config, options.cache);
  const int64_t blocks = std::min(slots * each, options.cache_bytes / block_bytes);
  TWELL_REQUIRE(blocks >= 1, "a cache of {} bytes is smaller than a block of {} tokens, {} bytes",
                options.cache_bytes, block_tokens, block_bytes);
  return {blocks, std::min(capacity, blocks * block_tokens)};
}

SessionCpu::SessionCpu(Context& ctx, const ModelView& model, const SessionOptions& options)
    : SessionCpu(ctx, model, options, cache_plan(model.config, options)) {}

SessionCpu::SessionCpu(Context& ctx, const ModelView& model, const SessionOptions& options,
                       const CachePlan& plan)
    : ctx_(ctx),
      model_(model),
      state_(model.config, options.ffn),
      blocks_(plan.blocks, options.cache.block_tokens, options.slots),
      cache_(model.config, options.slots, plan.capacity, options.cache, plan.blocks),
      prefill_tokens_(checked_prefill_tokens(options, kPrefillTokens)),
      hidden_(std::max(std::min(prefill_tokens_, cache_.capacity()), options.slots) *
              model.config.width),
      logits_(options.slots * model.config.vocab_size) {}

int64_t SessionCpu::start(int64_t slot, std::span<const int32_t> ids) {
  clear(slot);
  const int64_t held = blocks_.start(slot, ids);
  cache_.set_table(slot, blocks_.table(slot));
  cache_.set_length(slot, held);
  return held;
}

bool SessionCpu::reserve(int64_t slot, int64_t tokens) {
  if (length(slot) + tokens > capacity() || !blocks_.reserve(slot, tokens)) return false;
  const std::span<const int32_t> table = blocks_.table(slot);
  if (table.size() != cache_.table(slot).size()) cache_.set_table(slot, table);
  return true;
}

CacheUse SessionCpu::cache_use() const {
  return {.block_tokens = blocks_.block_tokens(),
          .blocks = blocks_.blocks(),
          .used = blocks_.used(),
          .cached = blocks_.cached()};
}

void SessionCpu::clear(int64_t slot) {
  blocks_.release(slot);
  cache_.set_table(slot, {});
  cache_.set_length(slot, 0);
}

void SessionCpu::make_room(int64_t slot, std::span<const int32_t> ids) {
  require_room(slot, ids);
  TWELL_REQUIRE(reserve(slot, std::ssize(ids)),
                "the cache has no room for {} more tokens: {} of its {} blocks of {} are in use",
                ids.size(), blocks_.used(), blocks_.blocks(), blocks_.block_tokens());
}

MatrixF SessionCpu::run_layers(std::span<const int32_t> ids,
                               std::span<const ForwardSequence> sequences) {
  const MatrixF hidden = hidden_.matrix(std::ssize(ids), model_.config.width);
  forward(ctx_, model_, state_,
          {.ids = ids, .sequences = sequences, .cache = &cache_, .hidden = hidden});
  for (const ForwardSequence& sequence : sequences) {
    const auto count = static_cast<size_t>(sequence.tokens);
    blocks_.append(sequence.slot, ids.first(count));
    ids = ids.subspan(count);
  }
  return hidden;
}

std::span<float> SessionCpu::logits_row(int64_t row) const {
  const int64_t vocab = model_.config.vocab_size;
  return {logits_.data() + row * vocab, static_cast<size_t>(vocab)};
}

std::span<const float> SessionCpu::append_to(int64_t row, int64_t slot,
                                             std::span<const int32_t> ids) {
  make_room(slot, ids);
  MatrixF hidden;
  const auto most = static_cast<size_t>(prefill_tokens_);
  for (size_t begin = 0; begin < ids.size(); begin += most) {
    const auto piece = ids.subspan(begin, std::min(most, ids.size() - begin));
    const ForwardSequence sequence{.tokens = std::ssize(piece), .slot = slot};
    hidden = run_layers(piece, {&sequence, 1});
  }
  const std::span<float> out = logits_row(row);
  logits(ctx_, model_, hidden.slice_rows(hidden.rows - 1, 1), {out.data(), 1, std::ssize(out)});
  return out;
}

std::span<const float> SessionCpu::append(int64_t slot, std::span<const int32_t> ids) {
  return append_to(0, slot, ids);
}

void SessionCpu::append_and_draw(std::span<const Prompt> prompts, std::span<const Draw> draws,
                                 std::span<int32_t> next) {
  TWELL_CHECK(std::ssize(prompts) <= slots(), "{} prompts for {} sequences", prompts.size(),
              slots());
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    next[i] = draw_from(append_to(row, prompts[i].slot, prompts[i].ids), draws[i]);
  }
}

void SessionCpu::decode_and_draw(std::span<const int64_t> slots, std::span<const int32_t> ids,
                                 std::span<const Draw> draws, std::span<int32_t> next) {
  decode(slots, ids);
  for (size_t i = 0; i < slots.size(); ++i) {
    next[i] = draw_from(logits_row(static_cast<int64_t>(i)), draws[i]);
  }
}

void SessionCpu::append_scored(int64_t slot, std::span<const int32_t> ids,
                               const OnLogits& on_logits) {
  make_room(slot, ids);
  constexpr int64_t kLogitRows = 64;  // enough for the output head to be a matrix product
  const Buffer<float> rows(std::min(kLogitRows, std::ssize(ids)) * model_.config.vocab_size);
  for (int64_t begin = 0; begin < std::ssize(ids); begin += prefill_tokens_) {
    const int64_t count = std::min(prefill_tokens_, std::ssize(ids) - begin);
    const ForwardSequence sequence{.tokens = count, .slot = slot};
    const MatrixF hidden = run_layers(
        ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)), {&sequence, 1});
    for (int64_t row = 0; row < count; row += kLogitRows) {
      const int64_t some = std::min(kLogitRows, count - row);
      const MatrixF out = rows.matrix(some, model_.config.vocab_size);
      logits(ctx_, model_, hidden.slice_rows(row, some), out);
      on_logits(begin + row, out);
    }
  }
}

std::span<const float> SessionCpu::drawn_from(int64_t row) { return logits_row(row); }

std::vector<ActiveNeurons> SessionCpu::active_neurons() const {
  std::vector<ActiveNeurons> layers;
  for (const FfnPlan& plan : state_.ffn_plans) {
    layers.push_back(
        {.per_token = plan.nnz_per_token(), .sparse = plan.execution != FfnExecution::kDense});
  }
  return layers;
}

ConstMatrixF SessionCpu::decode(std::span<const int64_t> slots, std::span<const int32_t> ids) {
  TWELL_CHECK(slots.size() == ids.size() && !slots.empty() && std::ssize(slots) <= cache_.slots(),
              "decode takes one token for each of 1..{} sequences, got {} slots and {} tokens",
              cache_.slots(), slots.size(), ids.size());
  std::vector<ForwardSequence> sequences;
  for (size_t i = 0; i < slots.size(); ++i) {
    make_room(slots[i], ids.subspan(i, 1));
    sequences.push_back({.tokens = 1, .slot = slots[i]});
  }
  const MatrixF hidden = run_layers(ids, sequences);
  const MatrixF out = logits_.matrix(std::ssize(ids), model_.config.vocab_size);
  logits(ctx_, model_, hidden, out);
  return out;
}

double SessionCpu::nnz_per_token() {
  double nnz = 0.0;
  for (const FfnPlan& plan : state_.ffn_plans) nnz += plan.nnz_per_token();
  return nnz / static_cast<double>(state_.ffn_plans.size());
}

}  // namespace twell
