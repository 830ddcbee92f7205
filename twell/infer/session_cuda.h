// SPDX-License-Identifier: Apache-2.0
// A session on the GPU. The cache takes what its sequences need, or what activations leave of the
// device's memory. From its second step on, decoding a given number of sequences replays a
// CUDA graph. The host waits for the device only to read results, and of calls that draw it can
// begin the next one before that: the device reads the tokens where it drew them. Draws with a
// filter wait for the tokens before them, and their masks are made, once the layers are at work.
#pragma once

#include <array>
#include <memory>
#include <utility>

#include "twell/base/context.h"
#include "twell/infer/sampler_cuda.h"
#include "twell/infer/session.h"
#include "twell/infer/step_graphs.h"
#include "twell/model/forward_cuda.h"

namespace twell {

// The model and the context must outlive the session. InputError when activations and the keys and
// values of one sequence do not fit into device memory; the message gives the numbers.
class SessionCuda : public Session {
 public:
  // reserved_bytes: device memory that the cache leaves to others.
  SessionCuda(CudaContext& ctx, const ModelCuda& model, const SessionOptions& options,
              int64_t reserved_bytes = 0);
  ~SessionCuda() override;
  // Estimated device memory that a session takes at least in addition to the model.
  static int64_t bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                              const SessionOptions& options);

  std::span<const float> append(int64_t slot, std::span<const int32_t> ids) override;
  ConstMatrixF decode(std::span<const int64_t> slots, std::span<const int32_t> ids) override;
  // Short pieces go through the layers together, long ones in passes.
  int64_t append_and_draw(std::span<const NewTokens> tokens, std::span<const Draw> draws) override;
  void drawn(int64_t call, std::span<int32_t> next) override;
  int64_t draws_ahead() const override { return std::ssize(results_) - 1; }
  // Powers of two: each number of rows costs its first steps more, to capture their graph.
  int64_t drafts_of_step(int64_t drafts) const override;
  double step_cost(int64_t rows) const override;
  void append_logits(int64_t slot, std::span<const int32_t> ids,
                     const OnLogits& on_logits) override;
  TokenLogProbs drawn_log_probs(int64_t row) override;
  std::vector<ActiveNeurons> active_neurons() const override;
  int64_t prefill_tokens() const override { return prefill_tokens_; }
  const ModelConfig& config() const override { return model_.config(); }
  double nnz_per_token() override;                              // waits for the device
  int64_t graphs_captured() const { return graphs_captured_; }  // so far

 private:
  struct Graph {
    bool warm = false;  // a first run without capture has initialized everything
    CudaGraph graph;
  };

  static ForwardPlanCuda forward_plan(const CachePlan& cache, const SessionOptions& options);
  static CachePlan full_plan(const ModelConfig& config, const SessionOptions& options);
  static CachePlan cache_plan(const CudaContext& ctx, const ModelConfig& config,
                              const SessionOptions& options, int64_t reserved_bytes);
  // Device memory of a session but for its keys and values.
  static int64_t other_bytes(const CudaContext& ctx, const ModelConfig& config,
                             const CachePlan& cache, const SessionOptions& options);
  void show(int64_t slot, std::span<const int32_t> table, int64_t length) override;
  // Enqueues the layers and the output head, for the last token of each entry, for which there is
  // room. Tokens are packed, and waited for where scores are wanted.
  void enqueue_packed(std::span<const NewTokens> tokens);
  // A part of a sequence's new tokens in a pass through the layers.
  struct Piece {
    const NewTokens* tokens;
    int64_t begin, count;  // of the ids
    int64_t row;           // in the pass
  };
  // Adds the scores of the pieces' targets, once the pass is enqueued.
  void score(std::span<const Piece> pieces);
  // The same for one token of each sequence, as a graph.
  void enqueue_decode(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
                      std::span<const float> uniforms);
  void enqueue_layers(int64_t sequences);
  ConstMatrixF read_logits(int64_t rows);
  // What a call that draws leaves in page-locked memory.
  struct Results {
    PinnedBuffer<int32_t> next;            // [rows]
    PinnedBuffer<TokenLogProb> log_probs;  // [logit_rows, 1 + kMostTop]
    std::vector<int64_t> top;              // [rows] most likely tokens wanted of each draw
    PinnedBuffer<uint32_t> masks;          // in, see make_masks()
    CudaEvent copied;
    int64_t tokens = 0;  // that passed the layers
  };
  Results& results_of(int64_t call) { return results_[static_cast<size_t>(call) % 2]; }
  // Enqueues draws from rows of logits with these random numbers, and the copies of their results.
  // Returns the number of the call, of which so many tokens pass the layers.
  int64_t draw_ids(std::span<const Draw> draws, const float* uniforms, int64_t tokens);
  // Makes and sends the masks of draws that have a filter, behind the work enqueued so far.
  // tokens: of each row.
  void make_masks(std::span<const NewTokens> tokens, std::span<const Draw> draws);
  // Applies the draws' penalties to their rows of logits; undo_penalties() takes them back.
  void penalize(std::span<const Draw> draws);
  void undo_penalties();
  // Enqueues the log-probabilities of these tokens, one for each row of logits from `row` on, and
  // of `top` most likely ones, and their copy to the results of the call that begins.
  void enqueue_log_probs(int64_t row, int64_t rows, const int32_t* ids, int64_t top, int64_t vocab);
  // The log-probabilities of a row that were copied; the device must have been waited for.
  static TokenLogProbs log_probs_of(const Results& results, int64_t row, int64_t top);
  // Call after reading results. Updates the FFN layers' executions at intervals that double, so
  // that graphs are captured again only a few times.
  void count_tokens(int64_t new_tokens);

  CudaContext& ctx_;
  const ModelCuda& model_;
  int64_t prefill_tokens_;
  ForwardCuda forward_;
  KvCacheCuda cache_;
  int64_t logit_rows_;                       // rows or, if more, rows scored together
  DeviceBuffer<float> logits_;               // [logit_rows, V]
  DeviceBuffer<int32_t> next_;               // [rows]
  DeviceBuffer<int32_t> last_rows_;          // [rows] of packed sequences' last tokens
  DeviceBuffer<float> uniforms_;             // [rows] for packed sequences
  DeviceBuffer<__nv_bfloat16> last_hidden_;  // [rows, D] for packed sequences
  DeviceBuffer<int32_t> targets_;            // [logit_rows] to be scored
  DeviceBuffer<TokenLogProb> log_probs_;     // [logit_rows, 1 + kMostTop]
  std::array<Results, 2> results_;           // of the calls that draw, in turn
  int64_t calls_ = 0;                        // begun
  int64_t asked_ = 0;                        // the one whose tokens were asked for last
  int64_t mask_words_ = 0;                   // of the masks of the draw under way; 0: it has none
  DeviceBuffer<uint32_t> masks_;             // [rows] numbers of masks, then masks; once needed
  std::unique_ptr<Context> mask_threads_;
  PenalizeCuda penalties_;                // of the draw under way
  DeviceBuffer<PenalizedRow> penalized_;  // [rows]
  DeviceBuffer<SeenToken> seen_;          // grows with the longest list so far
  DeviceBuffer<float> before_;
  PinnedBuffer<float> host_logits_;  // [slots, V]
  // Key: number of sequences, ForwardCuda::path().
  StepGraphs<std::pair<int64_t, route::LayersPath>, Graph> graphs_;
  int64_t graphs_captured_ = 0;
  int64_t tokens_ = 0;        // so far
  int64_t update_after_ = 1;  // tokens at which the FFN plans are updated next
};

}  // namespace twell
