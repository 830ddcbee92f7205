// SPDX-License-Identifier: Apache-2.0
// A session on the CPU. Its cache is paged: sequences that begin with the same tokens share blocks.
#pragma once

#include "twell/base/context.h"
#include "twell/infer/block_manager.h"
#include "twell/infer/session.h"
#include "twell/model/forward.h"
#include "twell/model/kv_cache.h"
#include "twell/model/weights.h"

namespace twell {

// The model and the context must outlive the session.
class SessionCpu : public Session {
 public:
  SessionCpu(Context& ctx, const ModelView& model, const SessionOptions& options);

  std::span<const float> append(int64_t slot, std::span<const int32_t> ids) override;
  ConstMatrixF decode(std::span<const int64_t> slots, std::span<const int32_t> ids) override;
  void append_and_draw(std::span<const Prompt> prompts, std::span<const Draw> draws,
                       std::span<int32_t> next) override;
  void decode_and_draw(std::span<const int64_t> slots, std::span<const int32_t> ids,
                       std::span<const Draw> draws, std::span<int32_t> next) override;
  void append_scored(int64_t slot, std::span<const int32_t> ids,
                     const OnLogits& on_logits) override;
  std::span<const float> drawn_from(int64_t row) override;
  std::vector<ActiveNeurons> active_neurons() const override;
  int64_t start(int64_t slot, std::span<const int32_t> ids) override;
  bool reserve(int64_t slot, int64_t tokens) override;
  int64_t free_tokens() const override { return blocks_.available() * blocks_.block_tokens(); }
  CacheUse cache_use() const override;
  void clear(int64_t slot) override;
  int64_t length(int64_t slot) const override { return cache_.length(slot); }
  int64_t slots() const override { return cache_.slots(); }
  int64_t capacity() const override { return cache_.capacity(); }
  int64_t prefill_tokens() const override { return prefill_tokens_; }
  const ModelConfig& config() const override { return model_.config; }
  double nnz_per_token() override;
  const ForwardState& state() const { return state_; }

 private:
  struct CachePlan {
    int64_t blocks, capacity;
  };
  static CachePlan cache_plan(const ModelConfig& config, const SessionOptions& options);
  SessionCpu(Context& ctx, const ModelView& model, const SessionOptions& options,
             const CachePlan& plan);
  // Runs the layers; the blocks of the sequences have room for the ids.
  MatrixF run_layers(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences);
  // InputError when ids is empty or does not fit the sequence or the cache.
  void make_room(int64_t slot, std::span<const int32_t> ids);
  // Logits after the last id, in row `row` of logits_.
  std::span<const float> append_to(int64_t row, int64_t slot, std::span<const int32_t> ids);
  std::span<float> logits_row(int64_t row) const;

  Context& ctx_;
  const ModelView& model_;
  ForwardState state_;
  BlockManager blocks_;
  KvCache cache_;
  int64_t prefill_tokens_;
  Buffer<float> hidden_;  // [max(prefill tokens, slots), D]
  Buffer<float> logits_;  // [slots, V]
};

}  // namespace twell
