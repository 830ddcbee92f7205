// SPDX-License-Identifier: Apache-2.0
// What a TrainingCuda holds in device memory. Internal to model.
#pragma once

#include <cuda_bf16.h>

#include <array>
#include <optional>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/training_cuda.h"
#include "twell/ops/embedding/embedding_cuda.h"

namespace twell {

// What the forward pass keeps of one layer for the backward pass. What backward computes again
// (recompute.h) lies in memory that all layers share.
struct LayerActivationsCuda {
  __nv_bfloat16* attention_in = nullptr;      // [M, D] residual stream before the attention
  __nv_bfloat16* attention_normed = nullptr;  // [M, D]
  __nv_bfloat16* qkv = nullptr;               // [M, (H + 2 * H_kv) * hd], queries and keys rotated
  float* logsumexp = nullptr;                 // [B, H, T]
  __nv_bfloat16* attended = nullptr;          // [M, H * hd]
  __nv_bfloat16* ffn_in = nullptr;            // [M, D] residual stream before the FFN
  __nv_bfloat16* ffn_normed = nullptr;        // [M, D]
};

struct ActivationViewsCuda {
  std::vector<LayerActivationsCuda> layers;  // [L]
  __nv_bfloat16* delta = nullptr;            // [M, D] what a block adds to the residual stream
  __nv_bfloat16* final_in = nullptr;         // [M, D]
  __nv_bfloat16* normed = nullptr;           // [M, D] shared: a block's normalised input
  __nv_bfloat16* mask = nullptr;             // [M, document_mask_row(T)] or null
  // Gradients with the forward pass's names, of one layer at a time.
  __nv_bfloat16* d_residual = nullptr;  // [M, D]
  __nv_bfloat16* d_normed = nullptr;    // [M, D]
  float* losses = nullptr;              // [M]
  float* partial = nullptr;             // partial sums over tokens, for norm weights and biases
  // In Buffers::scratch. Nothing here outlives the attention of a layer.
  __nv_bfloat16* qkv = nullptr;         // [M, (H + 2 * H_kv) * hd], shared
  __nv_bfloat16* d_qkv = nullptr;       // [M, (H + 2 * H_kv) * hd]
  __nv_bfloat16* d_attended = nullptr;  // [M, H * hd]
};

// The ids of one micro-batch on their way to the device; `copied` follows the copy.
struct StagingSlot {
  explicit StagingSlot(int64_t ids) : data(ids) {}
  ~StagingSlot() { cudaEventSynchronize(copied.get()); }
  StagingSlot(const StagingSlot&) = delete;
  StagingSlot& operator=(const StagingSlot&) = delete;

  PinnedBuffer<int32_t> data;
  CudaEvent copied;
};

// Memory for micro-batches of one shape.
struct TrainingCuda::Buffers {
  Buffers(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan, bool hybrid);
  // Makes scratch for hybrid layers, or for dense ones alone. Not while a pass is in flight.
  void make_scratch(CudaContext& ctx, const ModelConfig& config, const TrainingPlanCuda& plan,
                    bool hybrid);

  DeviceBuffer<std::byte> memory;
  ActivationViewsCuda views;
  std::vector<FfnSavedCuda> ffn;         // [L]
  std::vector<FfnExpectation> prepared;  // [L] what each was prepared for
  // A feed-forward layer, the attention of a layer and the head use this memory one after the
  // other.
  DeviceBuffer<std::byte> scratch;
  bool scratch_hybrid = false;
  std::optional<FfnTrainWorkspaceCuda> ffn_workspace;
  std::optional<CrossEntropyWorkspaceCuda> head;
  EmbeddingWorkspaceCuda embedding;
  DeviceBuffer<int32_t> batch;      // [2, M] inputs and targets; behind a mask [3, M]: and where
                                    // each token's document begins
  DeviceBuffer<float> cos, sin;     // [T, hd / 2]
  DeviceBuffer<int32_t> positions;  // [M]
  std::array<StagingSlot, 2> slots;
  size_t next_slot = 0;
};

// Numbers per token that a micro-batch has in Buffers::batch.
inline int64_t batch_rows(const TrainingPlanCuda& plan) { return plan.document_mask ? 3 : 2; }
inline int64_t token_count(MicroBatchShape shape) { return shape.sequences * shape.length; }

}  // namespace twell
