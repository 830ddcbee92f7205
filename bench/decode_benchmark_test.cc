// SPDX-License-Identifier: Apache-2.0
#include "bench/decode_benchmark.h"

#include <gtest/gtest.h>

#include "bench/synthetic_model.h"
#include "twell/infer/engine.h"
#include "twell/infer/test_model.h"

namespace twell {
namespace {

constexpr int64_t kDecodeVocab = 61;

ModelConfig small_config() {
  ModelConfig config = preset_config("tiny");
  config.layers = 2;
  config.vocab_size = kDecodeVocab;
  config.validate();
  return config;
}

TEST(RunDecode, OneNeuronIn200FiresAndTheSessionHoldsAllTokens) {
  Context ctx(2);
  std::unique_ptr<Model> model = synthetic_model(ctx, small_config(), 3);
  Model& weights = *model;
  EngineCpu engine(std::move(model), 2);
  for (const bool sparse : {false, true}) {
    const DecodeLoad load{.batch = 3, .prompt = 70, .tokens = 9, .eight_bit_cache = sparse};
    EXPECT_EQ(decode_session(engine.config(), load, FfnPolicy::kAuto).cache.eight_bits, sparse);
    set_synthetic_sparsity(weights, sparse);
    const auto policy = sparse ? FfnPolicy::kSparse : FfnPolicy::kDense;
    const auto session = engine.session(decode_session(engine.config(), load, policy));
    const DecodeRun run = run_decode(*session, load);
    EXPECT_GT(run.step_seconds, 0.0);
    for (int64_t slot = 0; slot < 3; ++slot) EXPECT_EQ(session->length(slot), 79);
    const auto neurons = static_cast<double>(engine.config().ffn);
    ASSERT_EQ(run.active.size(), 2u);
    for (const ActiveNeurons& layer : run.active) {
      EXPECT_EQ(layer.sparse, sparse);
      if (sparse) {
        EXPECT_NEAR(layer.per_token / neurons, 0.005, 0.003);
      }
    }
  }
}

TEST(RunDecode, FollowsTheGivenPrompts) {
  Context ctx(1);
  EngineCpu engine(synthetic_model(ctx, small_config(), 3), 1);
  constexpr int64_t kPrompt = 70;  // a whole block of the cache, and more
  const std::vector<int32_t> prompts = random_ids(2 * kPrompt, kDecodeVocab, 5);
  const DecodeLoad load{.batch = 2, .prompt = kPrompt, .tokens = 1, .prompts = prompts};
  const auto session = engine.session(decode_session(engine.config(), load, FfnPolicy::kDense));
  run_decode(*session, load);
  for (int64_t slot = 0; slot < 2; ++slot) {
    session->clear(slot);
    // The cache knows the block by the tokens in it.
    EXPECT_EQ(session->start(
                  slot, std::span(prompts).subspan(static_cast<size_t>(slot * kPrompt), kPrompt)),
              64);
  }
}

TEST(DecodeStepBytes, ReadsRowsThatFireOnly) {
  const ModelConfig config = small_config();
  const DecodeMemory memory{.weights = 4 * config.parameter_count(), .element = 4, .kv_token = 100};
  const DecodeLoad load{.batch = 2, .prompt = 10, .tokens = 5};
  const double dense = decode_step_bytes(config, memory, load, {});
  const int64_t embedding = config.tied_embeddings ? 0 : 4 * config.vocab_size * config.width;
  EXPECT_EQ(dense, static_cast<double>(4 * config.parameter_count() - embedding + 2 * 13 * 100));
  // A quarter of the neurons fires for each of two sequences: 7/16 of the rows of up and down are
  // read.
  const auto quarter = static_cast<double>(config.ffn) / 4.0;
  const std::vector<ActiveNeurons> active = {{quarter, true}, {quarter, false}};
  EXPECT_NEAR(decode_step_bytes(config, memory, load, active),
              dense - 9.0 / 16.0 * static_cast<double>(2 * 4 * config.width * config.ffn), 1.0);
}

}  // namespace
}  // namespace twell
