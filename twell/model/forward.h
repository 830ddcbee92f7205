// SPDX-License-Identifier: Apache-2.0
// Inference forward pass of the transformer over new tokens of one or several sequences, with or
// without a cache of past tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "twell/base/context.h"
#include "twell/base/error.h"
#include "twell/model/kv_cache.h"
#include "twell/model/weights.h"
#include "twell/ops/ffn/ffn.h"
#include "twell/ops/rope/rope.h"

namespace twell {

// Per-layer FFN plans and tables of a forward pass; created once per model and session.
struct ForwardState {
  ForwardState(const ModelConfig& config, FfnPolicy policy);
  // Covers the longest sequence so far, or the cache's capacity, and grows in forward(). A model's
  // context may be millions of tokens, of which a session uses few.
  RopeTable rope;
  std::vector<FfnPlan> ffn_plans;  // [L]
};

// New tokens of one sequence. With a cache they follow cache->length(slot), which then advances.
struct ForwardSequence {
  int64_t tokens = 0;  // number of new tokens
  int64_t slot = 0;    // cache slot
};

// The length of the longest sequence with its new tokens. InputError when one would exceed the
// context or the capacity of the cache (KvCache or KvCacheCuda; null: none). `in_turn`: entries
// next to one another may share a slot, and each follows the one in front of it.
template <typename Cache>
int64_t longest_length(const ModelConfig& config, std::span<const ForwardSequence> sequences,
                       const Cache* cache, bool in_turn = false) {
  int64_t longest = 0, in_front = 0;  // tokens of the entries in front that share the slot
  std::vector<int64_t> slots;
  for (const ForwardSequence& sequence : sequences) {
    const bool follows = in_turn && !slots.empty() && slots.back() == sequence.slot;
    if (!follows) in_front = 0;
    const int64_t past = cache == nullptr ? 0 : cache->length(sequence.slot);
    const int64_t total = past + in_front + sequence.tokens;
    in_front += sequence.tokens;
    longest = std::max(longest, total);
    TWELL_REQUIRE(total <= config.context,
                  "a sequence of {} tokens is longer than the model's context of {}", total,
                  config.context);
    if (cache == nullptr) continue;
    TWELL_REQUIRE(total <= cache->capacity(),
                  "a sequence of {} tokens is longer than the cache's capacity of {}", total,
                  cache->capacity());
    if (!follows) slots.push_back(sequence.slot);
  }
  std::sort(slots.begin(), slots.end());
  TWELL_CHECK(std::adjacent_find(slots.begin(), slots.end()) == slots.end(),
              "two sequences share a cache slot");
  return longest;
}

// What Forward::on_stage is called with.
enum class LayerStage {
  kInput,           // [M, D] the residual stream in front of the layer
  kAttentionNorm,   // [M, D]
  kQkv,             // [M, (H + 2 * H_kv) * hd], rotated
  kAttention,       // [M, H * hd]
  kAfterAttention,  // [M, D] the residual stream in front of the feed-forward layer
  kFfnNorm,         // [M, D] the input of the feed-forward layer, which has not run yet
  kFfn,             // [M, D] its result
};

struct Forward {
  std::span<const int32_t> ids;                // [M], the sequences one after the other
  std::span<const ForwardSequence> sequences;  // their tokens sum to M
  KvCache* cache = nullptr;                    // null: each sequence starts at position 0
  MatrixF hidden;                              // [M, D] out: after the final norm, before the head
  // Optional: [L][M], active FFN neurons per layer and token.
  std::vector<std::vector<int32_t>>* row_nnz = nullptr;
  // Optional: called with the result of each stage of each layer.
  std::function<void(int64_t layer, LayerStage stage, ConstMatrixF values)> on_stage;
};
// InputError when a sequence would exceed the context or the cache's capacity.
void forward(Context& ctx, const ModelView& model, ForwardState& state, const Forward& problem);

// logits [M, V] = hidden [M, D] head^T
void logits(Context& ctx, const ModelView& model, ConstMatrixF hidden, MatrixF out);

}  // namespace twell
