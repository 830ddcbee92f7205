// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <vector>

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

// The neurons that a scorer names are those that the forward counts, in batches beyond a chunk of
// tokens too, whose rows are then those of the same sequences by themselves.
TEST(Scorer, NamesTheNeuronsThatTheForwardCounts) {
  ModelConfig config;
  config.vocab_size = 97;
  config.width = 32;
  config.ffn = 72;
  config.layers = 2;
  config.heads = config.kv_heads = 2;
  config.head_dim = 16;
  config.context = 256;
  Context ctx(2);
  Model model(config);
  init_weights(ctx, model, 5);
  ScorerCpu scorer(ctx, model);
  constexpr int64_t kLength = 230, kSequences = 5;  // 1,150 tokens: two chunks and a part
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kLength * kSequences; ++i) {
    ids.push_back(static_cast<int32_t>((i * 31 + i / kLength * 7) % config.vocab_size));
  }
  const auto score = [&](std::span<const int32_t> tokens, int64_t sequences) {
    const std::vector<ForwardSequence> all(static_cast<size_t>(sequences),
                                           ForwardSequence{.tokens = kLength});
    const std::vector<int64_t> rows = {0};
    const std::vector<int32_t> targets = {1};
    std::vector<float> losses(1);
    std::vector<std::vector<int32_t>> row_nnz;
    std::vector<Pattern> fired;
    scorer.score({.ids = tokens,
                  .sequences = all,
                  .rows = rows,
                  .targets = targets,
                  .row_nnz = &row_nnz,
                  .on_fired =
                      [&](int64_t layer, const Pattern& pattern) {
                        EXPECT_EQ(layer, std::ssize(fired));
                        fired.push_back(pattern);
                      }},
                 losses);
    EXPECT_EQ(fired.size(), 2u);
    for (size_t layer = 0; layer < fired.size(); ++layer) {
      EXPECT_EQ(fired[layer].rows(), std::ssize(tokens));
      for (int64_t row = 0; row < fired[layer].rows(); ++row) {
        EXPECT_EQ(std::ssize(fired[layer].row(row)), row_nnz[layer][static_cast<size_t>(row)])
            << "layer " << layer << ", token " << row;
      }
    }
    return fired;
  };
  const std::vector<Pattern> together = score(ids, kSequences);
  for (int64_t sequence = 0; sequence < kSequences; ++sequence) {
    const std::vector<Pattern> alone =
        score(std::span(ids).subspan(static_cast<size_t>(sequence * kLength), kLength), 1);
    for (size_t layer = 0; layer < 2; ++layer) {
      for (int64_t row = 0; row < kLength; ++row) {
        const auto want = alone[layer].row(row),
                   got = together[layer].row(sequence * kLength + row);
        EXPECT_TRUE(std::ranges::equal(want, got))
            << sequence << ", layer " << layer << ", " << row;
      }
    }
  }
}

}  // namespace
}  // namespace twell
