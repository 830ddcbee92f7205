// SPDX-License-Identifier: Apache-2.0
// Activations and their gradients in a training pass over one micro-batch, in one block of memory.
// Internal to model.
#pragma once

#include <span>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/model/qkv.h"
#include "twell/model/training.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/rope/rope.h"

namespace twell {

// Values of one layer that the forward pass stores for the backward pass.
struct LayerActivations {
  MatrixF attention_in;                // [M, D] residual stream before the attention
  float* attention_inv_rms = nullptr;  // [M]
  MatrixF attention_normed;            // [M, D]
  MatrixF qk_in;                       // [M, (H + H_kv) * hd] input of the q/k norms, or empty
  float* qk_inv_rms = nullptr;         // [(H + H_kv) * M], null without those norms
  MatrixF qkv;                         // [M, (H + 2 * H_kv) * hd], queries and keys rotated
  float* logsumexp = nullptr;          // [M, H]
  MatrixF attended;                    // [M, H * hd]
  MatrixF ffn_in;                      // [M, D] residual stream before the FFN
  float* ffn_inv_rms = nullptr;        // [M]
  MatrixF ffn_normed;                  // [M, D]
};

struct ActivationViews {
  std::vector<LayerActivations> layers;  // [L]
  MatrixF delta;                         // [M, D] output of a block, to be added to the residual
  MatrixF final_in;                      // [M, D]
  float* final_inv_rms = nullptr;        // [M]
  MatrixF final_normed;                  // [M, D]
  // Gradients, named after the values in the forward pass; for one layer at a time.
  MatrixF d_residual;  // [M, D]
  MatrixF d_normed;    // [M, D]
  MatrixF d_qkv;       // [M, (H + 2 * H_kv) * hd]
  MatrixF d_attended;  // [M, H * hd]
};

struct TrainingState::Activations {
  Activations(const ModelConfig& config, MicroBatchShape shape_in);
  // What attends to itself, with queries, keys and values from one layer's qkv: the documents of
  // these lengths, or the whole sequences when there are none.
  std::vector<AttentionSequence> sequences(const QkvViews& qkv,
                                           std::span<const int64_t> documents = {}) const;

  MicroBatchShape shape;
  Buffer<float> memory;
  ActivationViews views;
  std::vector<FfnSaved> ffn;  // [L]
  RopeTable rope;
  Buffer<int32_t> positions;  // [M] within the document
};

}  // namespace twell
