// SPDX-License-Identifier: Apache-2.0
#include "twell/model/forward.h"

#include <algorithm>

#include "twell/base/error.h"
#include "twell/model/qkv.h"
#include "twell/model/rotary.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/bias/bias.h"
#include "twell/ops/embedding/embedding.h"
#include "twell/ops/matmul/matmul.h"
#include "twell/ops/rms_norm/rms_norm.h"

namespace twell {
namespace {

void check_shapes(const ModelConfig& config, const ForwardState& state, const Forward& problem) {
  int64_t tokens = 0;
  for (const ForwardSequence& sequence : problem.sequences) {
    TWELL_CHECK(sequence.tokens >= 1, "a sequence of {} tokens", sequence.tokens);
    tokens += sequence.tokens;
  }
  TWELL_CHECK(tokens == std::ssize(problem.ids), "{} ids for sequences of {} tokens in all",
              problem.ids.size(), tokens);
  TWELL_CHECK(problem.hidden.rows == tokens && problem.hidden.cols == config.width,
              "hidden [{}, {}] for {} tokens of width {}", problem.hidden.rows, problem.hidden.cols,
              tokens, config.width);
  TWELL_CHECK(std::ssize(state.ffn_plans) == config.layers, "{} FFN plans for {} layers",
              state.ffn_plans.size(), config.layers);
}

int64_t past_tokens(const Forward& problem, const ForwardSequence& sequence) {
  return problem.cache == nullptr ? 0 : problem.cache->length(sequence.slot);
}

// Positions that this forward may reach. With a cache this is its capacity, so that the table is
// not rebuilt for every token.
int64_t positions_used(const Forward& problem) {
  int64_t most = problem.cache == nullptr ? 0 : problem.cache->capacity();
  for (const ForwardSequence& sequence : problem.sequences) most = std::max(most, sequence.tokens);
  return most;
}

// One forward pass; everything except its result is in scratch memory.
class ForwardPass {
 public:
  ForwardPass(Context& ctx, const ModelView& model, ForwardState& state, const Forward& problem)
      : ctx_(ctx),
        config_(model.config),
        weights_(model.stored),
        state_(state),
        problem_(problem),
        scope_(ctx.scratch()) {
    const int64_t tokens = problem.hidden.rows;
    residual_ = scope_.matrix<float>(tokens, config_.width);
    delta_ = scope_.matrix<float>(tokens, config_.width);
    normed_ = scope_.matrix<float>(tokens, config_.width);
    qkv_ = scope_.matrix<float>(tokens, qkv_width(config_));
    attended_ = scope_.matrix<float>(tokens, config_.q_width());
    positions_ = {scope_.alloc<int32_t>(tokens), static_cast<size_t>(tokens)};
    lay_out_sequences();
  }

  void run() {
    embedding_forward(ctx_, problem_.ids, weights_.embedding, residual_,
                      config_.stream_embedding_scale());
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto& w = weights_.layers[static_cast<size_t>(layer)];
      if (layer == 0) {
        norm(w.attention_norm, normed_);
      } else {
        add_and_norm(w.attention_norm, normed_);
      }
      done(layer, LayerStage::kInput, residual_);
      done(layer, LayerStage::kAttentionNorm, normed_);
      project_qkv(w);
      if (w.b_qkv != nullptr) bias_forward(ctx_, w.b_qkv, qkv_);
      if (w.q_norm != nullptr) {
        head_norm_forward(ctx_, views_.q, config_.head_dim, w.q_norm, eps());
        head_norm_forward(ctx_, views_.k, config_.head_dim, w.k_norm, eps());
      }
      rope(ctx_, state_.rope, positions_, views_.qk);
      done(layer, LayerStage::kQkv, qkv_);
      attention(layer);
      done(layer, LayerStage::kAttention, attended_);
      linear_forward(ctx_, attended_, w.w_o, delta_);
      if (w.b_o != nullptr) bias_forward(ctx_, w.b_o, delta_);
      add_and_norm(w.ffn_norm, normed_);
      done(layer, LayerStage::kAfterAttention, residual_);
      done(layer, LayerStage::kFfnNorm, normed_);
      feed_forward(layer, w.ffn);
      done(layer, LayerStage::kFfn, delta_);
    }
    add_and_norm(weights_.final_norm, problem_.hidden, config_.hidden_scale());
    advance_cache();
  }

 private:
  void done(int64_t layer, LayerStage stage, ConstMatrixF values) const {
    if (problem_.on_stage) problem_.on_stage(layer, stage, values);
  }

  void lay_out_sequences() {
    views_ = split_qkv(config_, qkv_);
    int64_t row = 0;
    for (const ForwardSequence& sequence : problem_.sequences) {
      const int64_t past = past_tokens(problem_, sequence);
      for (int64_t i = 0; i < sequence.tokens; ++i) {
        positions_[static_cast<size_t>(row + i)] = static_cast<int32_t>(past + i);
      }
      AttentionSequence attended;
      attended.q_begin = row;
      attended.q_len = sequence.tokens;
      attended.k = views_.k.slice_rows(row, sequence.tokens);
      attended.v = views_.v.slice_rows(row, sequence.tokens);
      attention_sequences_.push_back(attended);
      row += sequence.tokens;
    }
  }

  // y = norm(residual)
  void norm(const float* weight, MatrixF y) {
    rms_norm_forward(ctx_, {.x = residual_, .weight = weight, .y = y, .eps = eps()});
  }

  // residual += delta; y = norm(residual)
  void add_and_norm(const float* weight, MatrixF y, float scale = 1.0f) {
    rms_norm_forward(ctx_, {.x = residual_,
                            .residual = delta_,
                            .sum = residual_,
                            .weight = weight,
                            .y = y,
                            .eps = eps(),
                            .scale = scale});
  }

  template <typename Layer>
  void project_qkv(const Layer& w) {
    if (!w.w_qkv.empty()) return linear_forward(ctx_, normed_, w.w_qkv, qkv_);
    linear_forward(ctx_, normed_, w.w_q, views_.q);
    linear_forward(ctx_, normed_, w.w_k, views_.k);
    linear_forward(ctx_, normed_, w.w_v, views_.v);
  }

  void attention(int64_t layer) {
    if (problem_.cache != nullptr) append_to_cache(layer);
    attention_forward(ctx_, {.shape = {config_.heads, config_.kv_heads, config_.head_dim,
                                       config_.window_of(layer)},
                             .sequences = attention_sequences_,
                             .q = views_.q,
                             .out = attended_});
  }

  // Appends the new keys and values to the cached ones; the queries then read them from the cache.
  void append_to_cache(int64_t layer) {
    KvCache& cache = *problem_.cache;
    for (size_t i = 0; i < attention_sequences_.size(); ++i) {
      AttentionSequence& sequence = attention_sequences_[i];
      const int64_t slot = problem_.sequences[i].slot;
      const int64_t past = cache.length(slot);
      ctx_.parallel_for(sequence.q_len, 64, [&](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
          const int64_t row = sequence.q_begin + token;
          cache.store(layer, slot, past + token, views_.k.row(row), views_.v.row(row));
        }
      });
      cache.show(layer, slot, past + sequence.q_len, sequence);
    }
  }

  void feed_forward(int64_t layer, const StoredFfnWeights& weights) {
    std::span<int32_t> row_nnz;
    if (problem_.row_nnz != nullptr) {
      row_nnz = (*problem_.row_nnz)[static_cast<size_t>(layer)];
    }
    ffn_forward(ctx_, weights, normed_, delta_, state_.ffn_plans[static_cast<size_t>(layer)],
                row_nnz);
  }

  void advance_cache() {
    if (problem_.cache == nullptr) return;
    for (const ForwardSequence& sequence : problem_.sequences) {
      const int64_t length = problem_.cache->length(sequence.slot) + sequence.tokens;
      problem_.cache->set_length(sequence.slot, length);
    }
  }

  float eps() const { return config_.stream_eps(); }

  Context& ctx_;
  const ModelConfig& config_;
  const StoredMatrices& weights_;
  ForwardState& state_;
  const Forward& problem_;
  Arena::Scope scope_;
  MatrixF residual_;  // [M, D] the residual stream
  MatrixF delta_;     // [M, D] output of the last block, not added yet
  MatrixF normed_;    // [M, D]
  MatrixF qkv_;       // [M, (H + 2 * H_kv) * hd]
  MatrixF attended_;  // [M, H * hd]
  QkvViews views_;
  std::span<int32_t> positions_;  // [M]
  std::vector<AttentionSequence> attention_sequences_;
};

}  // namespace

ForwardState::ForwardState(const ModelConfig& config, FfnPolicy policy)
    : rope(rope_table(config, 0)), ffn_plans(static_cast<size_t>(config.layers)) {
  for (FfnPlan& plan : ffn_plans) plan.policy = policy;
}

void forward(Context& ctx, const ModelView& model, ForwardState& state, const Forward& problem) {
  check_shapes(model.config, state, problem);
  longest_length(model.config, problem.sequences, problem.cache);
  if (problem.row_nnz != nullptr) {
    problem.row_nnz->resize(static_cast<size_t>(model.config.layers));
    for (std::vector<int32_t>& row_nnz : *problem.row_nnz) row_nnz.resize(problem.ids.size());
  }
  if (problem.ids.empty()) return;
  if (const int64_t positions = positions_used(problem); positions > state.rope.max_positions) {
    state.rope = rope_table(model.config, positions);
  }
  ForwardPass(ctx, model, state, problem).run();
}

void logits(Context& ctx, const ModelView& model, ConstMatrixF hidden, MatrixF out) {
  linear_forward(ctx, hidden, model.stored.head, out);
}

}  // namespace twell
