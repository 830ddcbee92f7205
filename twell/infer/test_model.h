// SPDX-License-Identifier: Apache-2.0
// A small random model and a tokenizer for the tests of this room.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "twell/base/context.h"
#include "twell/base/rng.h"
#include "twell/model/weights.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {

inline constexpr int64_t kVocab = 257, kSmallVocab = 61;

inline std::unique_ptr<Model> test_model(Context& ctx, int64_t vocab_size, uint64_t seed = 1) {
  ModelConfig config;
  config.vocab_size = vocab_size;
  config.width = 32;
  config.ffn = 96;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.context = 48;
  config.init_std = 0.3;  // large, so that logits differ by far more than rounding
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, seed);
  return model;
}

// The same with an output head of its own, and a token after which every output is NaN.
inline std::unique_ptr<Model> model_with_nan(Context& ctx, int64_t vocab_size, int32_t nan_token) {
  ModelConfig config = test_model(ctx, vocab_size)->config;
  config.tied_embeddings = false;
  auto model = std::make_unique<Model>(config);
  init_weights(ctx, *model, 1);
  const Matrix<float> embedding = model_matrices(config, model->flat.data()).embedding;
  embedding.data[nan_token * embedding.cols] = std::numeric_limits<float>::quiet_NaN();
  return model;
}

inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab_size, uint64_t seed) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(uniform_below(seed, 0, i, static_cast<uint64_t>(vocab_size)));
  }
  return ids;
}

}  // namespace twell
