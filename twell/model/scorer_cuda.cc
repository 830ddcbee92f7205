// SPDX-License-Identifier: Apache-2.0
#include "twell/model/scorer_cuda.h"

#include <algorithm>
#include <vector>

#include "twell/base/rounding.h"
#include "twell/ops/cross_entropy/cross_entropy_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/route/route.h"

namespace twell {
namespace {

using route::kRowStep;

// 256 MiB of logits keep the device busy for any vocabulary size.
int64_t head_rows(const ModelConfig& config) {
  constexpr int64_t kLogitBytes = int64_t{256} << 20;
  return std::clamp(kLogitBytes / (4 * config.vocab_size) / kRowStep, int64_t{1}, int64_t{32}) *
         kRowStep;
}

// Waits for the stream before it returns, because the host memory may be pageable.
template <typename T>
void copy(CudaContext& ctx, T* to, const T* from, int64_t n, cudaMemcpyKind kind) {
  TWELL_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<size_t>(n) * sizeof(T), kind, ctx.stream()));
}

template <typename T>
void grow(DeviceBuffer<T>& buffer, int64_t n) {
  if (buffer.size() >= n) return;
  buffer = {};
  buffer = DeviceBuffer<T>(round_up(n, 1024));
}

}  // namespace

// Finds the active neurons with the gate GEMM of the sparse executions.
class ScorerCuda::FiredNeurons {
 public:
  FiredNeurons(CudaContext& ctx, const ModelConfig& config)
      : ctx_(ctx),
        width_(config.width),
        ffn_(config.ffn),
        words_(shape(kTokens).words()),
        spill_(shape(kTokens).max_spill_slots() * kTile),
        row_nnz_(kTokens),
        host_words_(static_cast<size_t>(words_.size())),
        host_spill_(static_cast<size_t>(spill_.size())) {}

  Pattern find(int64_t tokens, const FfnWeightsCuda& weights, const __nv_bfloat16* x) {
    Pattern out{.cols = ffn_, .row_begin = {0}, .column = {}};
    for (int64_t begin = 0; begin < tokens; begin += kTokens) {
      append_rows(find_chunk(std::min(kTokens, tokens - begin), weights, x + begin * width_), out);
    }
    return out;
  }

 private:
  static constexpr int64_t kTokens = 2048;
  static constexpr int64_t kTile = 256;

  TwellShape shape(int64_t tokens) const {
    return {.rows = tokens, .cols = ffn_, .tile = int32_t{kTile}, .compression = 8};
  }

  Pattern find_chunk(int64_t tokens, const FfnWeightsCuda& weights, const __nv_bfloat16* x) {
    const TwellPacked gate{.shape = shape(tokens),
                           .words = words_.data(),
                           .spill = spill_.data(),
                           .spill_slots = shape(tokens).max_spill_slots(),
                           .row_nnz = row_nnz_.data()};
    const GateGemmCuda problem{.tokens = tokens,
                               .width = width_,
                               .ffn = ffn_,
                               .x = x,
                               .w_gate = weights.w_gate != nullptr ? weights.w_gate : weights.w_up,
                               .out = gate};
    if (ctx_.compute_capability() == 90) {
      gate_gemm_cuda(ctx_, problem);
    } else {
      gate_gemm_sm80_cuda(ctx_, problem);
    }
    TwellPacked host = gate;
    host.words = host_words_.data();
    host.spill = host_spill_.data();
    host.row_nnz = nullptr;
    copy(ctx_, host.words, gate.words, gate.shape.words(), cudaMemcpyDeviceToHost);
    copy(ctx_, host.spill, gate.spill, gate.spill_slots * kTile, cudaMemcpyDeviceToHost);
    TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
    return pattern_from_twell(host);
  }

  CudaContext& ctx_;
  int64_t width_, ffn_;
  DeviceBuffer<uint32_t> words_;
  DeviceBuffer<BF16> spill_;
  DeviceBuffer<int32_t> row_nnz_;
  std::vector<uint32_t> host_words_;
  std::vector<BF16> host_spill_;
};

ScorerCuda::ScorerCuda(CudaContext& ctx, const ModelCuda& model, FfnPolicy policy)
    : ctx_(ctx), model_(model), policy_(policy), head_rows_(head_rows(model.config())) {}

ScorerCuda::~ScorerCuda() { cudaStreamSynchronize(ctx_.stream()); }

int64_t ScorerCuda::bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                                 const ScorerPlan& plan) {
  const ForwardPlanCuda forward{.max_tokens = plan.tokens,
                                .max_sequences = plan.sequences,
                                .max_length = plan.length,
                                .ffn = plan.ffn,
                                .weights_in_bytes = plan.weights_in_bytes};
  return ForwardCuda::bytes_needed(ctx, config, forward) +
         KvCacheCuda::bytes(config, 1, plan.cache_tokens) +
         head_rows(config) * (4 * config.vocab_size + 2 * config.width) +
         4 * config.layers * plan.tokens;
}

void ScorerCuda::make_cache(int64_t slots, int64_t capacity) {
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  cache_.reset();
  cache_.emplace(config(), slots, capacity);
}

// Replaces a forward that is too small by one that fits this batch and all earlier ones.
void ScorerCuda::make_room(const ScoreBatch& batch) {
  int64_t length = batch.cached ? cache_.value().capacity() : 0;
  for (const ForwardSequence& sequence : batch.sequences) {
    if (!batch.cached) length = std::max(length, sequence.tokens);
  }
  const ForwardPlanCuda old = forward_ ? forward_->plan() : ForwardPlanCuda{};
  const ForwardPlanCuda plan{
      .max_tokens = std::max(old.max_tokens, std::ssize(batch.ids)),
      .max_sequences = std::max(old.max_sequences, round_up(std::ssize(batch.sequences), 64)),
      .max_length = std::max(old.max_length, length),
      .ffn = policy_};
  if (forward_ && plan.max_tokens == old.max_tokens && plan.max_length == old.max_length &&
      plan.max_sequences == old.max_sequences) {
    return;
  }
  std::vector<LayerActivity> activity;
  if (forward_) {
    const FfnPlansCuda& plans = forward_->ffn_plans();
    for (int64_t layer = 0; layer < plans.size(); ++layer) {
      activity.push_back(plans[layer].activity);
    }
    forward_.reset();
  }
  forward_.emplace(ctx_, model_, plan);
  for (size_t layer = 0; layer < activity.size(); ++layer) {
    forward_->ffn_plans()[static_cast<int64_t>(layer)].activity = activity[layer];
  }
}

void ScorerCuda::score(const ScoreBatch& batch, std::span<float> losses) {
  check(batch, losses);
  make_room(batch);
  ForwardHooksCuda hooks;
  if (batch.on_fired) {
    if (!fired_) fired_ = std::make_unique<FiredNeurons>(ctx_, config());
    hooks.ffn = [&](int64_t layer, const FfnForwardCuda& problem) {
      ffn_forward_cuda(ctx_, problem, forward_->ffn_plans()[layer], forward_->ffn_workspace());
      batch.on_fired(layer, fired_->find(problem.tokens, problem.weights, problem.x));
    };
  }
  if (batch.row_nnz != nullptr) grow(row_nnz_, config().layers * std::ssize(batch.ids));
  forward_->run(batch.ids, batch.sequences, batch.cached ? &cache_.value() : nullptr,
                batch.row_nnz != nullptr ? row_nnz_.data() : nullptr, hooks);
  if (!batch.rows.empty()) score_rows(batch, losses);
  if (batch.row_nnz != nullptr) read_row_nnz(batch);
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  if (batches_ == deciding_batches()) return;
  forward_->ffn_plans().update(ctx_);
  ++batches_;
}

void ScorerCuda::score_rows(const ScoreBatch& batch, std::span<float> losses) {
  const int64_t count = std::ssize(batch.rows), width = config().width;
  grow(rows_, count);
  grow(targets_, count);
  grow(losses_, count);
  if (logits_.size() == 0) {
    hidden_ = DeviceBuffer<__nv_bfloat16>(head_rows_ * width);
    logits_ = DeviceBuffer<float>(head_rows_ * config().vocab_size);
  }
  const std::vector<int32_t> rows(batch.rows.begin(), batch.rows.end());
  copy(ctx_, rows_.data(), rows.data(), count, cudaMemcpyHostToDevice);
  copy(ctx_, targets_.data(), batch.targets.data(), count, cudaMemcpyHostToDevice);
  for (int64_t begin = 0; begin < count; begin += head_rows_) {
    const int64_t chunk = std::min(head_rows_, count - begin);
    // Gather the scored rows with the embedding kernel.
    TWELL_CUDA_CHECK(launch_embedding({.tokens = chunk,
                                       .width = width,
                                       .ids = rows_.data() + begin,
                                       .table = forward_->hidden(),
                                       .out = hidden_.data()},
                                      ctx_.stream()));
    forward_->logits(hidden_.data(), std::min(round_up(chunk, kRowStep), head_rows_),
                     logits_.data());
    TWELL_CUDA_CHECK(launch_token_losses({.tokens = chunk,
                                          .vocab = config().vocab_size,
                                          .logits = logits_.data(),
                                          .targets = targets_.data() + begin,
                                          .losses = losses_.data() + begin},
                                         ctx_.stream()));
  }
  copy(ctx_, losses.data(), losses_.data(), count, cudaMemcpyDeviceToHost);
}

void ScorerCuda::read_row_nnz(const ScoreBatch& batch) const {
  batch.row_nnz->resize(static_cast<size_t>(config().layers));
  int64_t at = 0;
  for (std::vector<int32_t>& layer : *batch.row_nnz) {
    layer.resize(batch.ids.size());
    copy(ctx_, layer.data(), row_nnz_.data() + at, std::ssize(layer), cudaMemcpyDeviceToHost);
    at += std::ssize(layer);
  }
}

}  // namespace twell
