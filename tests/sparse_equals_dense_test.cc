// SPDX-License-Identifier: Apache-2.0
// Sparse against dense execution of the FFN, compared on the logits of whole models whose neurons
// range from almost never to always active.
#include <gtest/gtest.h>

#include <algorithm>

#include "twell/base/rng.h"
#include "twell/model/forward.h"
#include "twell/model/reference_model.h"

namespace twell {
namespace {

constexpr int64_t kLength = 67, kSequences = 3, kTokens = kLength * kSequences;

ModelConfig config_of(bool gated) {
  ModelConfig config = preset_config("tiny", gated);
  config.vocab_size = 64;
  config.width = 48;
  config.ffn = 600;  // two full tiles and a ragged one
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 12;
  config.init_std = 0.1;
  return config;
}

struct Outcome {
  std::vector<float> logits;
  std::vector<std::vector<int32_t>> row_nnz;
};

Outcome run(Context& ctx, const Model& model, FfnPolicy policy) {
  std::vector<int32_t> ids;
  for (uint64_t i = 0; i < kTokens; ++i) {
    ids.push_back(static_cast<int32_t>(uniform_below(9, 0, i, 64)));
  }
  const std::vector<ForwardSequence> sequences(kSequences, {.tokens = kLength});
  const Buffer<float> hidden(kTokens * model.config.width);
  const MatrixF hidden_matrix = hidden.matrix(kTokens, model.config.width);
  ForwardState state(model.config, policy);
  Outcome out;
  out.logits.resize(kTokens * 64);
  forward(ctx, model, state,
          {.ids = ids, .sequences = sequences, .hidden = hidden_matrix, .row_nnz = &out.row_nnz});
  logits(ctx, model, hidden_matrix, {out.logits.data(), kTokens, 64});
  return out;
}

double active_share(const Outcome& out, int64_t ffn) {
  double nnz = 0.0;
  for (const auto& layer : out.row_nnz) {
    for (const int32_t count : layer) nnz += count;
  }
  return nnz / static_cast<double>(out.row_nnz.size() * kTokens * ffn);
}

struct Density {
  const char* name;
  float shift;       // added to every gate along the direction that all tokens share
  float down_scale;  // small enough that many active neurons do not swamp that direction
  double least, most;
};

class SparseEqualsDense : public ::testing::TestWithParam<std::tuple<bool, Density>> {};

TEST_P(SparseEqualsDense, Logits) {
  const auto& [gated, density] = GetParam();
  const ModelConfig config = config_of(gated);
  Model model = sparse_model(config, 5, 0.0f);
  const auto weights = model_matrices<float>(config, model.flat.data());
  for (const LayerMatrices<float>& layer : weights.layers) {
    for (int64_t f = 0; f < config.ffn; ++f) layer.ffn.firing()(f, 0) += density.shift;
    for (int64_t f = 0; f < config.ffn; ++f) {
      for (int64_t d = 0; d < config.width; ++d) layer.ffn.w_down(f, d) *= density.down_scale;
      // No layer writes to the shared direction, so all layers see it unchanged.
      layer.ffn.w_down(f, 0) = 0.0f;
    }
    std::fill_n(layer.w_o.row(0), layer.w_o.cols, 0.0f);
  }
  Context ctx(2);
  const Outcome dense = run(ctx, model, FfnPolicy::kDense);
  EXPECT_GE(active_share(dense, config.ffn), density.least);
  EXPECT_LE(active_share(dense, config.ffn), density.most);
  for (const FfnPolicy policy : {FfnPolicy::kRowFused, FfnPolicy::kTileUnion, FfnPolicy::kAuto}) {
    const Outcome sparse = run(ctx, model, policy);
    EXPECT_LE(relative_error(std::span(sparse.logits), std::span(dense.logits)),
              float_tolerance(config));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Densities, SparseEqualsDense,
    ::testing::Combine(::testing::Bool(),
                       ::testing::Values(Density{"sparse", -0.9f, 1.0f, 1e-4, 0.1},
                                         Density{"half", 0.0f, 1.0f, 0.3, 0.7},
                                         Density{"dense", 3.0f, 0.002f, 0.999, 1.0})),
    [](const auto& instance) {
      return std::string(std::get<0>(instance.param) ? "gated_" : "plain_") +
             std::get<1>(instance.param).name;
    });

}  // namespace
}  // namespace twell
