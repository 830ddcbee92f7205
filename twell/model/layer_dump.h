// SPDX-License-Identifier: Apache-2.0
// Every stage of one layer for a prompt, for whoever compares executions, devices or versions: the
// first stage that differs is where to look. Stages in order, [M, columns] as f32:
//   input            the residual stream in front of the layer            D
//   attention_norm   its RMS norm                                         D
//   qkv              queries, keys, values; q and k rotated               (H + 2 H_kv) * hd
//   attention        what the heads attended to                           H * hd
//   after_attention  input + the output projection of `attention`         D
//   ffn_norm         its RMS norm, the input x of the feed-forward layer  D
//   gate             f(x w_gate^T); not in a layer without a gate         F
//   up               x w_up^T                                             F
//   hidden           f(gate product) * up, or f(up)                       F
//   ffn              the layer's y, as the execution computes it          D
//   output           after_attention + ffn                                D
// Executions never hold gate, up and hidden of all neurons. They are products of ffn_norm by the
// device's dense GEMM, rounded to bf16 on a GPU, whose activation f is applied here. All other
// stages are those of the forward.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/model/weights.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

struct DumpedStage {
  std::string name;
  int64_t cols = 0;
  std::vector<float> values;  // [M, cols]
};

struct LayerDump {
  std::vector<DumpedStage> stages;
  std::string execution;  // which the feed-forward layer ran
};

// InputError unless 1 to `context` ids are inside the vocabulary, and the model has this layer.
void check_layer_dump(const ModelConfig& config, std::span<const int32_t> ids, int64_t layer);
LayerDump dump_layer(Context& ctx, const ModelView& model, std::span<const int32_t> ids,
                     int64_t layer, FfnPolicy policy);

// Adds gate, up and hidden, of the products [M, F] of one layer; `gate` is empty where there is
// none.
void add_hidden_stages(const BlendedActivation& activation, std::vector<float> gate,
                       std::vector<float> up, int64_t ffn, LayerDump& dump);

// ||a - b|| / ||b||; 0 for two zeros, infinite or NaN where values are.
double relative_difference(std::span<const float> a, std::span<const float> b);

}  // namespace twell
