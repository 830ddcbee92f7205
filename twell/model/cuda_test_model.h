// SPDX-License-Identifier: Apache-2.0
// Small models for GPU tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/test_bf16.h"
#include "twell/model/weights.h"

namespace twell {

// Two layers for the kernel of all layers.
inline ModelConfig decode_model(int64_t width, int64_t ffn, int64_t heads, int64_t kv_heads,
                                int64_t head_dim, int64_t context) {
  ModelConfig config;
  config.vocab_size = 101;
  config.width = width;
  config.ffn = ffn;
  config.layers = 2;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.context = context;
  config.tied_embeddings = true;
  config.init_std = 0.8 / std::sqrt(static_cast<double>(width));
  return config;
}

// A model with random weights, rounded to bf16 as on the GPU.
inline std::unique_ptr<Model> rounded_model(Context& ctx, const ModelConfig& config) {
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, 3);
  for (const ParamSpec& spec : model->table) {
    for (int64_t i = spec.offset; i < spec.offset + spec.size(); ++i) {
      if (spec.is_vector) model->flat[i] += 0.1f * normal(9, 0, static_cast<uint64_t>(i));
      model->flat[i] = to_float(to_bf16(model->flat[i]));
    }
  }
  return model;
}

inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint64_t stream) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(
        uniform_below(4, stream, static_cast<uint64_t>(i), static_cast<uint64_t>(vocab))));
  }
  return ids;
}

}  // namespace twell
