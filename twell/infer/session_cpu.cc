// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session_cpu.h"

#include <algorithm>

#include "twell/base/error.h"

namespace twell {
namespace {

// Limits the memory for activations.
constexpr int64_t kPrefillTokens = 512;

}  // namespace

SessionCpu::SessionCpu(Context& ctx, const Model& model, const SessionOptions& options)
    : ctx_(ctx),
      model_(model),
      state_(model.config, options.ffn),
      cache_(model.config, checked_slots(options), checked_capacity(options, model.config)),
      prefill_tokens_(checked_prefill_tokens(options, kPrefillTokens)),
      hidden_(std::max(std::min(prefill_tokens_, cache_.capacity()), options.slots) *
              model.config.width),
      logits_(options.slots * model.config.vocab_size) {}

std::span<const float> SessionCpu::append(int64_t slot, std::span<const int32_t> ids) {
  require_room(slot, ids);
  int64_t last = 0;  // tokens in the last piece
  const auto most = static_cast<size_t>(prefill_tokens_);
  for (size_t begin = 0; begin < ids.size(); begin += most) {
    const auto piece = ids.subspan(begin, std::min(most, ids.size() - begin));
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

ConstMatrixF SessionCpu::decode(std::span<const int64_t> slots, std::span<const int32_t> ids) {
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

double SessionCpu::nnz_per_token() {
  double nnz = 0.0;
  for (const FfnPlan& plan : state_.ffn_plans) nnz += plan.nnz_per_token();
  return nnz / static_cast<double>(state_.ffn_plans.size());
}

}  // namespace twell
