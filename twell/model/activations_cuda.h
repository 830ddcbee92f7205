// SPDX-License-Identifier: Apache-2.0
// Where a training pass on the GPU writes down its activations: two blocks of device memory, cut up
// by functions that the memory plan runs without the memory. Internal to model.
#pragma once

#include <cuda_bf16.h>

#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/training_cuda.h"

namespace twell {

// What the forward pass keeps of one layer for the backward pass.
struct LayerActivationsCuda {
  __nv_bfloat16* attention_in = nullptr;      // [M, D] residual stream in front of the attention
  __nv_bfloat16* attention_normed = nullptr;  // [M, D], or the shared one: made again
  __nv_bfloat16* qkv = nullptr;               // [M, (H + 2 * H_kv) * hd], rotated; or the shared
  float* logsumexp = nullptr;                 // [B, H, T]
  __nv_bfloat16* attended = nullptr;          // [M, H * hd]
  __nv_bfloat16* ffn_in = nullptr;      // [M, D] residual stream in front of the FFN, or the shared
  __nv_bfloat16* ffn_normed = nullptr;  // [M, D], or the shared one
};

struct ActivationViewsCuda {
  std::vector<LayerActivationsCuda> layers;  // [L]
  __nv_bfloat16* delta = nullptr;            // [M, D] what a block adds to the residual stream
  __nv_bfloat16* final_in = nullptr;         // [M, D]
  __nv_bfloat16* normed = nullptr;           // [M, D] a block's input, where not kept
  // Gradients of what the forward pass calls by the same names, one layer at a time.
  __nv_bfloat16* d_residual = nullptr;  // [M, D]
  __nv_bfloat16* d_normed = nullptr;    // [M, D]
  float* losses = nullptr;              // [M]
  float* partial = nullptr;             // sums over tokens: of a norm's weight, of a bias
  // In the memory that stages use in turn, so that none outlives the attention of a layer.
  __nv_bfloat16* qkv = nullptr;         // [M, (H + 2 * H_kv) * hd], where not kept
  __nv_bfloat16* d_qkv = nullptr;       // [M, (H + 2 * H_kv) * hd]
  __nv_bfloat16* d_attended = nullptr;  // [M, H * hd]
};

struct ActivationPlanCuda {
  std::vector<MemoryItem> items;
  int64_t bytes = 0;  // of all
};
ActivationPlanCuda plan_activations(const ModelConfig& config, const TrainingPlanCuda& plan);
// Into a block of that many bytes; the attention's own are placed below.
ActivationViewsCuda place_activations(const ModelConfig& config, const TrainingPlanCuda& plan,
                                      std::byte* block);

// What only the attention of the layer at work needs.
int64_t attention_scratch_bytes(const ModelConfig& config, const TrainingPlanCuda& plan);
void place_attention_scratch(const ModelConfig& config, const TrainingPlanCuda& plan,
                             std::byte* block, ActivationViewsCuda& views);

}  // namespace twell
