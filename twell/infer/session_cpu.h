// SPDX-License-Identifier: Apache-2.0
// A session on the CPU.
#pragma once

#include "twell/base/context.h"
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
  // Single tokens in front, and their drafts, pass the layers together, others one sequence after
  // the other. All are known: nothing is drawn ahead.
  int64_t append_and_draw(std::span<const NewTokens> tokens, std::span<const Draw> draws) override;
  void drawn(int64_t call, std::span<int32_t> next) override;
  double step_cost(int64_t rows) const override;
  void append_logits(int64_t slot, std::span<const int32_t> ids,
                     const OnLogits& on_logits) override;
  TokenLogProbs drawn_log_probs(int64_t row) override;
  std::vector<ActiveNeurons> active_neurons() const override;
  int64_t prefill_tokens() const override { return prefill_tokens_; }
  const ModelConfig& config() const override { return model_.config; }
  const ForwardState& state() const { return state_; }

 private:
  static CachePlan cache_plan(const ModelConfig& config, const SessionOptions& options);
  void show(int64_t slot, std::span<const int32_t> table, int64_t length) override;
  // Runs the layers; the blocks of the sequences have room for the ids.
  MatrixF run_layers(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences);
  // Logits after the last id, in row `row` of logits_.
  std::span<const float> append_to(int64_t row, int64_t slot, std::span<const int32_t> ids);
  std::span<float> logits_row(int64_t row) const;
  // Appends tokens with targets, and leaves the logits after the last one in logits_row(row).
  void append_scored(int64_t row, const NewTokens& tokens);
  void draw_row(int64_t row, const Draw& draw);

  Context& ctx_;
  const ModelView& model_;
  ForwardState state_;
  KvCache cache_;
  int64_t prefill_tokens_;
  Buffer<float> hidden_;  // [max(prefill tokens, rows), D]
  Buffer<float> logits_;  // [rows, V]
  struct Drawn {
    int32_t id = kNoToken;
    int64_t top = 0, vocab = 0;
  };
  std::vector<Drawn> drawn_;  // [rows] from logits_
  int64_t calls_ = 0;         // that drew
};

}  // namespace twell
