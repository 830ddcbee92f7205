// SPDX-License-Identifier: Apache-2.0
// Inference forward pass of the transformer on the GPU, over new tokens of one or several
// sequences, with or without a cache: forward.h in bf16. Memory is planned once, for the largest
// batch. A forward allocates only plans for matrix products of new shapes, and never waits for the
// device.
// ForwardCuda is defined in these files, by subject: forward_cuda.cc (memory, the order of a
// forward), forward_staging, forward_attention, forward_layers, forward_bytes (projections in
// e4m3), forward_screens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/batch_cuda.h"
#include "twell/model/forward.h"
#include "twell/model/kv_cache_cuda.h"
#include "twell/model/model_cuda.h"
#include "twell/ops/attention/attention_cuda.h"
#include "twell/ops/decode/decode_layers.h"
#include "twell/ops/ffn/ffn_cuda.h"
#include "twell/ops/route/route.h"
#include "twell/ops/skinny/layer_ops.h"

namespace twell {

struct ForwardPlanCuda {
  int64_t max_tokens = 0;     // largest batch, summed over sequences
  int64_t max_sequences = 0;  // most sequences in a batch
  int64_t max_length = 0;     // longest sequence, including cached tokens
  FfnPolicy ffn = FfnPolicy::kAuto;
  bool eight_bit_cache = false;   // the cache that sequences are staged with, if any, is in 8 bits
  bool weights_in_bytes = false;  // the model's projections are in e4m3; a forward sets it
};

// Stages of a layer, for timing. kQkv includes the rotation; kOutput and kFfn include the addition
// to the residual stream.
enum class ForwardStage { kEmbedding, kNorm, kQkv, kAttention, kOutput, kFfn };

// Replacements for parts of the forward pass; for benchmarks and tests.
struct ForwardHooksCuda {
  std::function<void(ForwardStage stage)> after_stage;
  // Runs a layer's FFN in place of ffn_forward_cuda.
  std::function<void(int64_t layer, const FfnForwardCuda& problem)> ffn;
  // Runs the layers as one kernel for any sequence length, and reads gates through screens for any
  // activity.
  bool one_kernel = false;
};

// The buffers of a forward, for hooks.
struct ForwardBuffersCuda {
  const __nv_bfloat16* residual;  // [M, D]
  const __nv_bfloat16* hidden;    // [M, D]
  const __nv_bfloat16* qkv;       // [M, (H + 2 H_kv) * hd]
  const __nv_bfloat16* attended;  // [M, H * hd]
};

class ForwardCuda {
 public:
  // InputError when the device has too little memory; the message gives the numbers. The context
  // and the model must outlive this object.
  ForwardCuda(CudaContext& ctx, const ModelCuda& model, const ForwardPlanCuda& plan);
  // Estimated device memory that a ForwardCuda takes. A policy with screens takes a byte per weight
  // of the gates and one per value of hidden() more.
  static int64_t bytes_needed(const CudaContext& ctx, const ModelConfig& config,
                              const ForwardPlanCuda& plan);

  // Creates screens of the gates (ops/decode), which halve the gate bytes read when decoding one
  // sequence, if the model supports them and they take less than half of the free memory; otherwise
  // returns false. Results stay the same. The model's weights must not change afterwards.
  bool make_screens();
  // Device memory of the screens, 0 where the model or the device does not support them.
  static int64_t screen_bytes(const CudaContext& ctx, const ModelConfig& config,
                              const ForwardPlanCuda& plan);
  // Device memory of the 8-bit copies that a policy with screens takes; part of bytes_needed.
  int64_t rotated_memory() const {
    return rotated_gates_.bytes() + gate_spreads_.bytes() + gate_roundings_.bytes() +
           rotated_hidden_.bytes() + token_bounds_.bytes();
  }

  // Checks the batch, advances the cache, whose blocks must have room, and enqueues the copies of
  // the batch's description and of the cache's tables, once the device has begun with the batch
  // before. Consecutive sequences may be of one slot: each goes on where the one before ends, and
  // attends to it. InputError when a sequence would exceed the context or the cache's capacity.
  // uniforms, one per sequence or none, are copied to the device too, for a sampler. drawn: device
  // memory; an id below 0 stands for drawn[-1 - id].
  void stage(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
             KvCacheCuda* cache, std::span<const float> uniforms = {},
             const int32_t* drawn = nullptr);
  // Enqueues the layers for the staged batch. A captured graph can be replayed after each stage()
  // with the same number of sequences, tokens per sequence, drawn and path(), until ffn_plans() are
  // updated. row_nnz: optional device memory [L, M] for active neurons per layer and token.
  void enqueue(int32_t* row_nnz = nullptr, const ForwardHooksCuda& hooks = {});
  // The executions for the staged batch, unless hooks or row_nnz require single ops.
  route::LayersPath path() const;

  // stage, enqueue.
  void run(std::span<const int32_t> ids, std::span<const ForwardSequence> sequences,
           KvCacheCuda* cache, int32_t* row_nnz = nullptr, const ForwardHooksCuda& hooks = {});

  const __nv_bfloat16* hidden() const { return hidden_.data(); }  // [M, D] after the final norm
  ForwardBuffersCuda buffers() const {
    return {residual_.data(), hidden_.data(), qkv_.data(), attended_.data()};
  }
  // logits [rows, V] f32 of hidden states [rows, D].
  void logits(const __nv_bfloat16* hidden, int64_t rows, float* out) const;

  FfnPlansCuda& ffn_plans() { return ffn_plans_; }
  const FfnPlansCuda& ffn_plans() const { return ffn_plans_; }
  FfnWorkspaceCuda& ffn_workspace() { return ffn_; }
  BatchCuda& batch() { return batch_; }
  const ModelCuda& model() const { return model_; }
  const ForwardPlanCuda& plan() const { return plan_; }

 private:
  // For a cache in 8 bits: new keys and values are made in qkv_ and stored from there, and prompts
  // attend to a layer's copy in bf16, because cuDNN takes no bytes. The copy has room for any
  // sequence with some more tokens, so that most batches are one group of sequences; the groups of
  // larger ones take turns.
  struct WideRows {
    int64_t blocks = 0;                        // with block 0, whose values are zero
    DeviceBuffer<__nv_bfloat16> keys, values;  // [blocks * kKvBlock, H_kv * hd]
    DeviceBuffer<int32_t> table;               // [blocks] 0, 1, 2, ...: a table of every sequence
    DeviceBuffer<int64_t> qkv_rows;  // [M] rows of H_kv * hd in qkv_ from a token's keys on
  };
  // Consecutive sequences that one call of attention takes.
  struct SequenceGroup {
    int64_t first = 0, count = 0, max_q_len = 0, max_kv_len = 0;
    bool widened = false;    // reads wide_
    AttentionRagged ragged;  // made by enqueue(), unless widened
  };
  // The batch staged last.
  struct Staged {
    int64_t tokens = 0, sequences = 0, max_q_len = 0, max_kv_len = 0;
    bool uniform = false;  // equally long whole sequences, no cache
    bool repeats = false;  // several of them are one slot's
    KvCacheCuda* cache = nullptr;
    const int32_t* drawn = nullptr;
    std::vector<SequenceGroup> groups;
  };
  static int64_t wide_blocks(const ForwardPlanCuda& plan);
  static int64_t wide_bytes(const ModelConfig& config, const ForwardPlanCuda& plan);
  void make_wide_rows();
  void make_down_rows();
  const uint8_t* down_rows(int64_t layer) const {
    return down_rows_.size() == 0 ? nullptr
                                  : down_rows_.data() + layer * config_.ffn * config_.width;
  }
  bool eight_bits() const { return staged_.cache != nullptr && staged_.cache->eight_bits(); }
  // Assigns the staged sequences to groups, and to places in wide_. Over a cache, those with one
  // new token in front of all others are a group of their own, which runs the kernel for decoding.
  std::vector<SequenceGroup> grouped(const BatchArrays& host) const;
  route::Batch staged_batch(bool observed, bool one_kernel) const;
  // Sets layers_.sparse where the plans have been updated since.
  void find_sparse_layers();
  // The alternatives of route::LayersPath: the first two run one layer, the third all layers.
  void enqueue_layer(int64_t layer, int32_t* row_nnz, const ForwardHooksCuda& hooks);
  bool takes_few_bytes() const;
  // The layer's output projection of attended_ is added to residual_.
  void project_attended(int64_t layer);
  void project_attended_bytes(int64_t layer);
  // Residual to bytes_, [M, D]; `rows` as for norm().
  void norm_bytes(const BF16* weight, const int32_t* rows = nullptr) const;
  // logits() with a head in e4m3: hidden states are quantised per token, in bytes_.
  void logits_of_bytes(const __nv_bfloat16* hidden, int64_t rows, float* out) const;
  // A projection's input in e4m3, and a layer's weights; empty where they are in bf16.
  ByteRowsCuda bytes() const { return {bytes_.values.data(), bytes_.scales.data()}; }
  LayerBytesCuda bytes_of(int64_t layer) const {
    return model_.in_bytes() ? model_.layer_bytes(layer) : LayerBytesCuda{};
  }
  // The input in bf16; null where it is in e4m3.
  const __nv_bfloat16* normed() const { return model_.in_bytes() ? nullptr : hidden_.data(); }
  FfnWeightsCuda ffn_weights(int64_t layer) const;
  route::LayersPath choose_path(bool observed, bool one_kernel) const;
  void enqueue_few_tokens_layer(int64_t layer);
  void enqueue_decode_layers(const ForwardHooksCuda& hooks);
  // Returns the bytes of the matrices that a sparse layer reads whole, for route::sparse_requests.
  int64_t read_layer_bytes() const;
  // A layer's weights in e4m3.
  void set_decode_bytes(int64_t layer, DecodeLayers& problem) const;
  AttentionCuda attention_of(int64_t layer, const SequenceGroup& group) const;
  void attention(int64_t layer);
  void store_bytes(int64_t layer) const;
  // The same over wide_, which it fills.
  AttentionCuda widened(int64_t layer, const SequenceGroup& group) const;
  // Where the kernels of the projection put a layer's new keys and values.
  struct NewRows {
    __nv_bfloat16 *keys, *values;
    const int64_t* rows;
  };
  NewRows new_rows(int64_t layer) const;
  // The layer's q/k/v product of x (through the RMS norm with these weights, unless null), whose
  // keys and values go into the cache.
  layer_ops::Qkv cached_qkv(int64_t layer, const __nv_bfloat16* x, const BF16* norm) const;
  void project(int64_t layer);  // what norm_input() wrote to rotated queries, keys and values
  // Residual to hidden; `rows`: the row of each token there, null: its own.
  void norm(const BF16* weight, const int32_t* rows = nullptr, float scale = 1.0f) const;
  // Residual to the input of a projection: hidden, or bytes_.
  void norm_input(const BF16* weight, const int32_t* rows = nullptr) const {
    model_.in_bytes() ? norm_bytes(weight, rows) : norm(weight, rows);
  }
  // The same as norm() for a feed-forward layer that reads `rotated` behind this gate's screen.
  void norm_rotated(const BF16* weight, const FfnForwardCuda& ffn, const int32_t* rows) const;
  // Device memory of 8-bit copies of the gates and of hidden_, and these.
  static int64_t rotated_bytes(const CudaContext& ctx, const ModelConfig& config,
                               const ForwardPlanCuda& plan);
  void make_rotated_gates();
  RotatedGateCuda rotated_gate(int64_t layer) const;  // without values where there are none
  // Whether feed-forward layers may take the staged batch sorted by id.
  bool sorts_rows() const;
  // Padded number of rows in matrix products: few different shapes need few plans.
  int64_t padded_tokens() const;
  float threshold() const { return static_cast<float>(config_.activation_threshold); }

  CudaContext& ctx_;
  const ModelCuda& model_;
  const ModelConfig& config_;
  ForwardPlanCuda plan_;
  Staged staged_;
  BatchCuda batch_;
  AttentionWorkspaceCuda attention_;
  FfnWorkspaceCuda ffn_;
  FfnPlansCuda ffn_plans_;
  DecodeWorkspaceShape decode_shape_;
  DeviceBuffer<uint8_t> decode_memory_;  // of a DecodeWorkspace
  GpuFfnLayer ffn_layer_;
  route::Layers layers_;
  int64_t plans_revision_ = -1;        // of which layers_.sparse is; -1: not set yet
  DeviceBuffer<uint8_t> screen_rows_;  // [L, F, screen_row_bytes(D)]; empty: no screens
  DeviceBuffer<float> screen_errors_;  // [L, F]
  // 8-bit copies of the gates, rotated, and of hidden_; none without a policy with screens, or
  // where no call of the plan would use them.
  std::optional<ScreenBound> screen_bound_;
  DeviceBuffer<int8_t> rotated_gates_;     // [L, F, D]
  DeviceBuffer<int32_t> gate_spreads_;     // [L, F rounded up to 256]
  DeviceBuffer<float> gate_roundings_;     // [L]
  DeviceBuffer<int8_t> rotated_hidden_;    // [M, D]
  DeviceBuffer<TokenBound> token_bounds_;  // [M]
  DeviceBuffer<float> cos_, sin_;          // [max_sequence, hd / 2]
  DeviceBuffer<__nv_bfloat16> residual_;   // [M, D] which each block adds to
  DeviceBuffer<__nv_bfloat16> hidden_;     // [M, D] normalised: a block's input, the result
  DeviceBuffer<__nv_bfloat16> qkv_;        // [M, (H + 2 H_kv) * hd]
  DeviceBuffer<__nv_bfloat16> attended_;   // [M, H * hd]
  DeviceBuffer<uint8_t> down_rows_;        // [L, F, D] w_down in e4m3 for sparse decoding, or none
  WideRows wide_;                          // nothing unless plan_.eight_bit_cache
  // A projection's input in e4m3; nothing unless the model's projections are.
  struct {
    DeviceBuffer<uint8_t> values;  // [M, max(D, H * hd)]
    DeviceBuffer<float> scales;    // [M]
  } bytes_;
};

}  // namespace twell
