// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/session_cuda.h"

#include <algorithm>
#include <vector>

#include "twell/base/rng.h"
#include "twell/infer/sampler_cuda.h"

namespace twell {
namespace {

// Tokens of a prompt that go through the layers together: enough to fill the device.
constexpr int64_t kPrefillTokens = 2048;
// Graphs are kept for this many numbers of sequences.
constexpr size_t kMaxGraphs = 32;

template <typename T>
T* page_locked(int64_t n) {
  T* memory = nullptr;
  TWELL_CUDA_CHECK(
      cudaMallocHost(reinterpret_cast<void**>(&memory), static_cast<size_t>(n) * sizeof(T)));
  return memory;
}

}  // namespace

ForwardPlanCuda SessionCuda::forward_plan(const ModelConfig& config,
                                          const SessionOptions& options) {
  const int64_t capacity = checked_capacity(options, config), slots = checked_slots(options);
  return {.max_tokens = std::max(std::min(kPrefillTokens, capacity), slots),
          .max_sequences = slots,
          .max_length = capacity,
          .ffn = options.ffn};
}

int64_t SessionCuda::bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                                  const SessionOptions& options) {
  const ForwardPlanCuda plan = forward_plan(config, options);
  return ForwardCuda::bytes_needed(ctx, config, plan) +
         KvCacheCuda::bytes(config, plan.max_sequences, plan.max_length) +
         4 * plan.max_sequences * config.vocab_size;
}

SessionCuda::SessionCuda(CudaContext& ctx, const ModelCuda& model, const SessionOptions& options)
    : ctx_(ctx),
      model_(model),
      forward_(ctx, model, forward_plan(model.config(), options)),
      cache_(model.config(), options.slots, checked_capacity(options, model.config())),
      logits_(options.slots * model.config().vocab_size),
      next_(options.slots),
      host_logits_(page_locked<float>(logits_.size())),
      host_next_(page_locked<int32_t>(next_.size())) {}

SessionCuda::~SessionCuda() {
  cudaStreamSynchronize(ctx_.stream());
  drop_graphs();
  cudaFreeHost(host_logits_);
  cudaFreeHost(host_next_);
}

void SessionCuda::drop_graphs() {
  for (auto& [sequences, graph] : graphs_) {
    if (graph.executable != nullptr) cudaGraphExecDestroy(graph.executable);
  }
  graphs_.clear();
}

std::span<const float> SessionCuda::append(int64_t slot, std::span<const int32_t> ids) {
  enqueue_append(slot, ids, {});
  const ConstMatrixF logits = read_logits(1);
  update_ffn_plans(std::ssize(ids));
  return {logits.data, static_cast<size_t>(logits.cols)};
}

ConstMatrixF SessionCuda::decode(std::span<const int64_t> slots, std::span<const int32_t> ids) {
  enqueue_decode(slots, ids, {});
  const ConstMatrixF logits = read_logits(std::ssize(slots));
  update_ffn_plans(std::ssize(slots));
  return logits;
}

int32_t SessionCuda::append_and_draw(int64_t slot, std::span<const int32_t> ids, const Draw& draw,
                                     DrawPosition at) {
  draw.sampler.validate();
  const float random = uniform(draw.sampler.seed, at.stream, at.index);
  enqueue_append(slot, ids, {&random, 1});
  int32_t next = 0;
  const int64_t last = (std::ssize(ids) - 1) % forward_.plan().max_tokens + 1;
  draw_ids(last, 1, draw, {&next, 1});
  update_ffn_plans(std::ssize(ids));
  return next;
}

void SessionCuda::decode_and_draw(std::span<const int64_t> slots, std::span<const int32_t> ids,
                                  const Draw& draw, std::span<const DrawPosition> at,
                                  std::span<int32_t> next) {
  draw.sampler.validate();
  std::vector<float> uniforms;
  for (const DrawPosition& position : at) {
    uniforms.push_back(uniform(draw.sampler.seed, position.stream, position.index));
  }
  enqueue_decode(slots, ids, uniforms);
  draw_ids(std::ssize(slots), std::ssize(slots), draw, next);
  update_ffn_plans(std::ssize(slots));
}

void SessionCuda::enqueue_append(int64_t slot, std::span<const int32_t> ids,
                                 std::span<const float> uniforms) {
  require_room(slot, ids);
  const auto step = static_cast<size_t>(forward_.plan().max_tokens);
  int64_t last = 0;  // tokens in the last piece
  for (size_t begin = 0; begin < ids.size(); begin += step) {
    const auto piece = ids.subspan(begin, std::min(step, ids.size() - begin));
    last = std::ssize(piece);
    const ForwardSequence sequence{.tokens = last, .slot = slot};
    forward_.stage(piece, {&sequence, 1}, &cache_, uniforms);
    forward_.enqueue();
    forward_.enqueued();
  }
  forward_.logits(forward_.hidden() + (last - 1) * config().width, 1, logits_.data());
}

void SessionCuda::enqueue_layers(int64_t sequences) {
  forward_.enqueue();
  forward_.logits(forward_.hidden(), sequences, logits_.data());
}

void SessionCuda::enqueue_decode(std::span<const int64_t> slots, std::span<const int32_t> ids,
                                 std::span<const float> uniforms) {
  const int64_t count = std::ssize(slots);
  TWELL_CHECK(slots.size() == ids.size() && count > 0 && count <= cache_.slots(),
              "decode takes one token for each of 1..{} sequences, got {} slots and {} tokens",
              cache_.slots(), slots.size(), ids.size());
  std::vector<ForwardSequence> sequences;
  for (const int64_t slot : slots) sequences.push_back({.tokens = 1, .slot = slot});
  forward_.stage(ids, sequences, &cache_, uniforms);
  if (graphs_.size() > kMaxGraphs) drop_graphs();
  Graph& graph = graphs_[count];
  if (!graph.warm) {
    enqueue_layers(count);
    graph.warm = true;
  } else {
    if (graph.executable == nullptr) {
      cudaGraph_t captured = nullptr;
      TWELL_CUDA_CHECK(cudaStreamBeginCapture(ctx_.stream(), cudaStreamCaptureModeThreadLocal));
      enqueue_layers(count);
      TWELL_CUDA_CHECK(cudaStreamEndCapture(ctx_.stream(), &captured));
      const cudaError_t status = cudaGraphInstantiate(&graph.executable, captured, 0);
      cudaGraphDestroy(captured);
      TWELL_CUDA_CHECK(status);
    }
    TWELL_CUDA_CHECK(cudaGraphLaunch(graph.executable, ctx_.stream()));
  }
  forward_.enqueued();
}

ConstMatrixF SessionCuda::read_logits(int64_t rows) {
  const int64_t vocab = config().vocab_size;
  TWELL_CUDA_CHECK(cudaMemcpyAsync(host_logits_, logits_.data(),
                                   static_cast<size_t>(rows * vocab) * sizeof(float),
                                   cudaMemcpyDeviceToHost, ctx_.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  return {host_logits_, rows, vocab};
}

void SessionCuda::draw_ids(int64_t tokens, int64_t rows, const Draw& draw,
                           std::span<int32_t> next) {
  const int64_t vocab = config().vocab_size;
  TWELL_CUDA_CHECK(launch_sample({.rows = rows,
                                  .vocab = draw.vocab == 0 ? vocab : std::min(draw.vocab, vocab),
                                  .stride = vocab,
                                  .logits = logits_.data(),
                                  .uniforms = forward_.batch().device(tokens, rows).uniforms,
                                  .ids = next_.data(),
                                  .temperature = draw.sampler.temperature,
                                  .top_k = draw.sampler.top_k,
                                  .top_p = draw.sampler.top_p,
                                  .min_p = draw.sampler.min_p},
                                 ctx_.stream()));
  TWELL_CUDA_CHECK(cudaMemcpyAsync(host_next_, next_.data(),
                                   static_cast<size_t>(rows) * sizeof(int32_t),
                                   cudaMemcpyDeviceToHost, ctx_.stream()));
  TWELL_CUDA_CHECK(cudaStreamSynchronize(ctx_.stream()));
  for (int64_t i = 0; i < rows; ++i) {
    TWELL_CHECK(host_next_[i] >= 0, "a logit of sequence {} is NaN, or none is finite", i);
    next[static_cast<size_t>(i)] = host_next_[i];
  }
}

void SessionCuda::update_ffn_plans(int64_t new_tokens) {
  tokens_ += new_tokens;
  if (tokens_ < update_after_) return;
  forward_.ffn_plans().update(ctx_);
  // Each time after twice as many tokens, so that graphs are captured anew a few times only.
  update_after_ = 2 * tokens_;
  drop_graphs();
}

double SessionCuda::nnz_per_token() {
  forward_.ffn_plans().update(ctx_);
  double nnz = 0.0;
  const FfnPlansCuda& plans = forward_.ffn_plans();
  for (int64_t layer = 0; layer < plans.size(); ++layer) nnz += plans[layer].plan.nnz_per_token();
  return nnz / static_cast<double>(plans.size());
}

}  // namespace twell
