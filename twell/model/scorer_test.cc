// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "twell/model/scorer_cpu.h"
#include "twell/model/weights.h"

namespace twell {
namespace {

// Also of matrices that are hashed in several pieces of 65,536 values.
TEST(Scorer, TheHashDependsOnEveryWeight) {
  ModelConfig config;
  config.vocab_size = 2100;
  config.width = 64;
  config.ffn = 96;
  config.layers = 1;
  config.heads = config.kv_heads = 2;
  config.head_dim = 32;
  config.context = 8;
  Context ctx(2);
  Model model(config);
  init_weights(ctx, model, 1);
  std::set<std::string> hashes = {ScorerCpu(ctx, model).weights_hash()};
  EXPECT_TRUE(hashes.contains(ScorerCpu(ctx, model).weights_hash()));
  const Matrix<float> embedding = model_matrices(config, model.flat.data()).embedding;
  const int64_t size = embedding.rows * embedding.cols;
  for (const int64_t at : {int64_t{0}, int64_t{65'535}, int64_t{65'536}, int64_t{131'072}, size - 1,
                           std::ssize(model.flat.span()) - 1}) {
    float& value = model.flat.data()[at];
    const float before = value;
    value += 1.0f;
    EXPECT_TRUE(hashes.insert(ScorerCpu(ctx, model).weights_hash()).second) << at;
    value = before;
  }
}

}  // namespace
}  // namespace twell
