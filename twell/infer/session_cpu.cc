// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session_cpu.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {
namespace {

// Limits the memory for activations.
constexpr int64_t kPrefillTokens = 512;

// A step reads all weights once, but on a few cores it is the arithmetic of each row that takes
// most of the time.
constexpr double kRowCost = 0.7;

}  // namespace

SessionCpu::CachePlan SessionCpu::cache_plan(const ModelConfig& config,
                                             const SessionOptions& options) {
  const CachePlan plan = full_cache(options, config);
  if (options.cache_bytes == 0) return plan;
  return cache_within(plan, options.cache_bytes, KvCache::block_bytes(config, options.cache));
}

SessionCpu::SessionCpu(Context& ctx, const ModelView& model, const SessionOptions& options)
    : Session(cache_plan(model.config, options)),
      ctx_(ctx),
      model_(model),
      state_(model.config, options.ffn),
      cache_(model.config, slots(), capacity(), options.cache, blocks()),
      prefill_tokens_(checked_prefill_tokens(options, kPrefillTokens)),
      hidden_(std::max(std::min(prefill_tokens_, capacity()), rows()) * model.config.width),
      logits_(rows() * model.config.vocab_size),
      drawn_(static_cast<size_t>(rows())) {}

void SessionCpu::show(int64_t slot, std::span<const int32_t> table, int64_t length) {
  cache_.set_table(slot, table);
  cache_.set_length(slot, length);
}

MatrixF SessionCpu::run_layers(std::span<const int32_t> ids,
                               std::span<const ForwardSequence> sequences) {
  const MatrixF hidden = hidden_.matrix(std::ssize(ids), model_.config.width);
  forward(ctx_, model_, state_,
          {.ids = ids, .sequences = sequences, .cache = &cache_, .hidden = hidden});
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
    appended(slot, piece);
  }
  const std::span<float> out = logits_row(row);
  logits(ctx_, model_, hidden.slice_rows(hidden.rows - 1, 1), {out.data(), 1, std::ssize(out)});
  return out;
}

std::span<const float> SessionCpu::append(int64_t slot, std::span<const int32_t> ids) {
  return append_to(0, slot, ids);
}

int64_t SessionCpu::append_and_draw(std::span<const NewTokens> tokens,
                                    std::span<const Draw> draws) {
  make_room(tokens, draws);
  std::vector<ForwardSequence> together;
  std::vector<int32_t> ids;
  for (const NewTokens& one : tokens) {
    if (one.ids.size() != 1 || !one.targets.empty()) break;
    together.push_back({.tokens = 1 + std::ssize(one.drafts), .slot = one.slot});
    ids.push_back(one.ids[0]);
    ids.insert(ids.end(), one.drafts.begin(), one.drafts.end());
  }
  int64_t row = std::ssize(ids);
  if (row > 0) {
    const MatrixF hidden = run_layers(ids, together);
    for (const NewTokens& one : tokens.first(together.size())) appended(one.slot, one.ids);
    logits(ctx_, model_, hidden, logits_.matrix(row, model_.config.vocab_size));
  }
  for (const NewTokens& one : tokens.subspan(together.size())) {
    TWELL_CHECK(one.drafts.empty(), "guesses behind the tokens of a prompt");
    if (one.targets.empty()) {
      append_to(row++, one.slot, one.ids);
    } else {
      append_scored(row++, one);
    }
  }
  // One row is shared by the threads, several are dealt out.
  ctx_.parallel_for(row, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) draw_row(i, draws[static_cast<size_t>(i)]);
  });
  return ++calls_;
}

void SessionCpu::append_scored(int64_t row, const NewTokens& tokens) {
  const int64_t vocab = tokens.vocab == 0 ? model_.config.vocab_size : tokens.vocab;
  append_logits(tokens.slot, tokens.ids, [&](int64_t first, ConstMatrixF rows) {
    for (int64_t i = 0; i < rows.rows; ++i) {
      const std::span<const float> values(rows.row(i), static_cast<size_t>(rows.cols));
      const int64_t at = first + i;
      if (at < std::ssize(tokens.targets)) {
        tokens.scores->push_back(
            token_log_probs(values, tokens.targets[static_cast<size_t>(at)], tokens.top, vocab));
      }
      if (at + 1 == std::ssize(tokens.ids)) std::ranges::copy(values, logits_row(row).begin());
    }
  });
}

void SessionCpu::drawn(int64_t call, std::span<int32_t> next) {
  TWELL_CHECK(call == calls_, "the tokens of call {}, after {} calls", call, calls_);
  for (size_t i = 0; i < next.size(); ++i) next[i] = drawn_[i].id;
}

void SessionCpu::append_logits(int64_t slot, std::span<const int32_t> ids,
                               const OnLogits& on_logits) {
  make_room(slot, ids);
  constexpr int64_t kLogitRows = 64;  // enough for the output head to be a matrix product
  const Buffer<float> rows(std::min(kLogitRows, std::ssize(ids)) * model_.config.vocab_size);
  for (int64_t begin = 0; begin < std::ssize(ids); begin += prefill_tokens_) {
    const int64_t count = std::min(prefill_tokens_, std::ssize(ids) - begin);
    const ForwardSequence sequence{.tokens = count, .slot = slot};
    const auto piece = ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
    const MatrixF hidden = run_layers(piece, {&sequence, 1});
    appended(slot, piece);
    for (int64_t row = 0; row < count; row += kLogitRows) {
      const int64_t some = std::min(kLogitRows, count - row);
      const MatrixF out = rows.matrix(some, model_.config.vocab_size);
      logits(ctx_, model_, hidden.slice_rows(row, some), out);
      on_logits(begin + row, out);
    }
  }
}

void SessionCpu::draw_row(int64_t row, const Draw& draw) {
  drawn_[static_cast<size_t>(row)] = {.id = draw_from(logits_row(row), draw, ctx_),
                                      .top = draw.log_probs.value_or(0),
                                      .vocab = draw.vocab};
}

double SessionCpu::step_cost(int64_t rows) const {
  return 1.0 + kRowCost * static_cast<double>(rows - 1);
}

TokenLogProbs SessionCpu::drawn_log_probs(int64_t row) {
  const auto [id, top, vocab] = drawn_[static_cast<size_t>(row)];
  return token_log_probs(logits_row(row), id, top, vocab == 0 ? model_.config.vocab_size : vocab);
}

std::vector<ActiveNeurons> SessionCpu::active_neurons() const {
  std::vector<ActiveNeurons> layers;
  for (const FfnPlan& plan : state_.ffn_plans) {
    layers.push_back({.per_token = plan.nnz_per_token(), .sparse = plan.execution.sparse});
  }
  return layers;
}

ConstMatrixF SessionCpu::decode(std::span<const int64_t> slots, std::span<const int32_t> ids) {
  const MatrixF hidden = run_layers(ids, one_each(slots, ids));
  for (size_t i = 0; i < slots.size(); ++i) appended(slots[i], ids.subspan(i, 1));
  const MatrixF out = logits_.matrix(std::ssize(ids), model_.config.vocab_size);
  logits(ctx_, model_, hidden, out);
  return out;
}

}  // namespace twell
