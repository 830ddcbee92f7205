// SPDX-License-Identifier: Apache-2.0
// Activations and gradients of activations of a training pass over one micro-batch, in one block of
// memory. Internal to model.
#pragma once

#include <vector>

#include "twell/base/buffer.h"
#include "twell/model/qkv.h"
#include "twell/model/training.h"
#include "twell/ops/attention/attention.h"
#include "twell/ops/rope/rope.h"

namespace twell {

// What the forward pass keeps of one layer for the backward pass.
struct LayerActivations {
  MatrixF attention_in;                // [M, D] residual stream in front of the attention
  float* attention_inv_rms = nullptr;  // [M]
  MatrixF attention_normed;            // [M, D]
  MatrixF qk_in;                       // [M, (H + H_kv) * hd] inputs of their norms, or empty
  float* qk_inv_rms = nullptr;         // [(H + H_kv) * M], null without those norms
  MatrixF qkv;                         // [M, (H + 2 * H_kv) * hd], queries and keys rotated
  float* logsumexp = nullptr;          // [M, H]
  MatrixF attended;                    // [M, H * hd]
  MatrixF ffn_in;                      // [M, D] residual stream in front of the FFN
  float* ffn_inv_rms = nullptr;        // [M]
  MatrixF ffn_normed;                  // [M, D]
};

struct ActivationViews {
  std::vector<LayerActivations> layers;  // [L]
  MatrixF delta;                         // [M, D] what a block adds to the residual stream
  MatrixF final_in;                      // [M, D]
  float* final_inv_rms = nullptr;        // [M]
  MatrixF final_normed;                  // [M, D]
  // Gradients with the forward pass's names, of one layer at a time.
  MatrixF d_residual;  // [M, D]
  MatrixF d_normed;    // [M, D]
  MatrixF d_qkv;       // [M, (H + 2 * H_kv) * hd]
  MatrixF d_attended;  // [M, H * hd]
};

struct TrainingState::Activations {
  Activations(const ModelConfig& config, MicroBatchShape shape_in);
  // The sequences of the batch, with keys and values from one layer's qkv.
  std::vector<AttentionSequence> sequences(const QkvViews& qkv) const;

  MicroBatchShape shape;
  Buffer<float> memory;
  ActivationViews views;
  std::vector<FfnSaved> ffn;  // [L]
  RopeTable rope;
  Buffer<int32_t> positions;  // [M] within the sequence
};

}  // namespace twell
