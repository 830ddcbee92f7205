// SPDX-License-Identifier: Apache-2.0
// Whole models on the GPU against the CPU, on the same bf16 weights.
#include "twell/model/forward_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "twell/base/cuda_gtest.h"
#include "twell/model/cuda_test_model.h"

namespace twell {
namespace {

struct ModelCase {
  const char* name;
  ModelConfig config;
};

ModelConfig small(int64_t heads, int64_t kv_heads, int64_t head_dim, bool gated, bool tied) {
  ModelConfig config;
  config.vocab_size = 331;
  config.width = 64;
  config.ffn = 192;
  config.layers = 3;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.context = 300;
  config.gated = gated;
  config.tied_embeddings = tied;
  config.init_std = 0.1;
  return config;
}

std::vector<ModelCase> model_cases() {
  std::vector<ModelCase> cases = {{"mha_tied", small(4, 4, 16, true, true)},
                                  {"gqa_untied", small(4, 2, 16, true, false)},
                                  {"mqa_not_gated", small(4, 1, 32, false, true)},
                                  {"odd_head", small(2, 1, 24, true, false)},
                                  {"bias", small(8, 2, 8, true, true)},
                                  {"qk_norm", small(4, 2, 32, true, true)},
                                  {"silu", small(4, 2, 16, true, false)},
                                  {"gelu_not_gated", small(4, 4, 16, false, true)},
                                  {"gelu_tanh", small(4, 4, 16, true, true)},
                                  {"quick_gelu", small(4, 4, 16, true, true)},
                                  {"relu2", small(4, 2, 16, true, true)},
                                  {"relu2_not_gated", small(4, 4, 16, false, true)},
                                  {"window", small(4, 2, 16, true, true)},
                                  {"biases", small(4, 2, 16, true, true)},
                                  {"biases_relu", small(4, 2, 16, false, true)},
                                  {"odd_ffn", small(4, 2, 16, true, true)},
                                  {"odd_ffn_biases", small(4, 2, 16, true, false)}};
  cases[4].config.qkv_bias = true;
  cases[4].config.family = Family::kQwen2;
  cases[5].config.qk_norm = true;
  cases[5].config.family = Family::kQwen3;
  cases[6].config.activation = Activation::kSilu;
  cases[7].config.activation = Activation::kGelu;
  cases[8].config.activation = Activation::kGeluTanh;
  cases[9].config.activation = Activation::kQuickGelu;
  cases[10].config.activation = cases[11].config.activation = Activation::kRelu2;
  cases[12].config.sliding_window = 40;
  cases[12].config.full_attention = {false, true, false};
  for (const size_t biased : {13, 14, 16}) {
    ModelConfig& config = cases[biased].config;
    config.qkv_bias = config.o_bias = config.mlp_bias = true;
  }
  cases[13].config.activation = cases[16].config.activation = Activation::kSilu;
  cases[15].config.ffn = cases[16].config.ffn = 83;
  return cases;
}

class ForwardCudaTest : public testing::TestWithParam<ModelCase> {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    model_ = rounded_model(cpu_, GetParam().config);
    device_model_ = std::make_unique<ModelCuda>(*ctx_, *model_);
  }

  std::vector<float> cpu_logits(const std::vector<int32_t>& ids,
                                const std::vector<ForwardSequence>& sequences,
                                std::vector<std::vector<int32_t>>* row_nnz = nullptr) {
    ForwardState state(model_->config, FfnPolicy::kDense);
    Buffer<float> hidden(std::ssize(ids) * model_->config.width);
    const MatrixF rows = hidden.matrix(std::ssize(ids), model_->config.width);
    forward(cpu_, *model_, state,
            {.ids = ids, .sequences = sequences, .hidden = rows, .row_nnz = row_nnz});
    std::vector<float> out(ids.size() * static_cast<size_t>(model_->config.vocab_size));
    logits(cpu_, *model_, rows, MatrixF(out.data(), rows.rows, model_->config.vocab_size));
    return out;
  }

  std::vector<float> device_logits(ForwardCuda& forward, int64_t rows) {
    const auto out = poisoned<float>(rows * model_->config.vocab_size);
    forward.logits(forward.hidden(), rows, out.data());
    stream_->synchronize();
    return download(out);
  }

  // Twice the expected error: a layer rounds to bf16 in about ten places, each a relative 2^-9 at
  // most; errors of different places are independent, and norms keep their relative size.
  void expect_near(const std::vector<float>& got, const std::vector<float>& want,
                   double roundings = 10.0) {
    ASSERT_EQ(got.size(), want.size());
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = static_cast<double>(got[i]) - want[i];
      error += difference * difference;
      size += static_cast<double>(want[i]) * want[i];
    }
    const double layers = static_cast<double>(model_->config.layers);
    EXPECT_LE(std::sqrt(error / size), 2.0 * std::ldexp(std::sqrt(roundings * layers + 2.0), -9));
  }

  Context cpu_{2};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ModelCuda> device_model_;
};

TEST_P(ForwardCudaTest, LogitsOfRaggedBatchesEqualCpu) {
  const int64_t vocab = model_->config.vocab_size;
  for (const FfnPolicy policy : {FfnPolicy::kDense, FfnPolicy::kTileUnion, FfnPolicy::kAuto}) {
    if (policy != FfnPolicy::kDense && ctx_->compute_capability() != 90) continue;
    ForwardCuda forward(*ctx_, *device_model_,
                        {.max_tokens = 700, .max_sequences = 5, .max_length = 300, .ffn = policy});
    for (const std::vector<ForwardSequence>& sequences :
         std::vector<std::vector<ForwardSequence>>{{{1, 0}},
                                                   {{17, 0}, {1, 0}, {130, 0}, {64, 0}},
                                                   {{129, 0}, {129, 0}, {129, 0}},
                                                   {{300, 0}, {1, 0}}}) {
      int64_t tokens = 0;
      for (const ForwardSequence& sequence : sequences) tokens += sequence.tokens;
      const auto ids = random_ids(tokens, vocab, static_cast<uint64_t>(tokens));
      forward.run(ids, sequences, nullptr);
      const auto got = device_logits(forward, tokens);
      expect_near(got, cpu_logits(ids, sequences));
      forward.run(ids, sequences, nullptr);
      EXPECT_EQ(device_logits(forward, tokens), got) << "a second run differs";
    }
  }
}

TEST_P(ForwardCudaTest, PrefillInPiecesAndDecodeEqualCpu) {
  const int64_t vocab = model_->config.vocab_size;
  ForwardCuda forward(*ctx_, *device_model_,
                      {.max_tokens = 200, .max_sequences = 3, .max_length = 300});
  KvCacheCuda cache(model_->config, 3, 300);
  const std::vector<int64_t> lengths = {290, 5, 140};
  std::vector<std::vector<int32_t>> texts;
  for (const int64_t length : lengths) {
    texts.push_back(random_ids(length, vocab, static_cast<uint64_t>(length)));
  }
  // Feed all but the last three tokens in ragged pieces, some together with single tokens, then one
  // token at a time for all sequences.
  std::vector<int64_t> at = {0, 0, 0};
  std::vector<int32_t> ids;
  std::vector<ForwardSequence> sequences;
  const auto add = [&](size_t slot, int64_t count) {
    ids.insert(ids.end(), texts[slot].begin() + at[slot], texts[slot].begin() + at[slot] + count);
    sequences.push_back({count, static_cast<int64_t>(slot)});
    at[slot] += count;
  };
  const auto run = [&] {
    forward.run(ids, sequences, &cache);
    ids.clear();
    sequences.clear();
  };
  add(0, 150);
  run();
  add(0, 1);
  add(2, 130);
  add(1, 1);
  run();
  add(2, 1);
  add(1, 1);
  add(0, 136);
  run();
  add(2, 6);
  run();
  std::vector<float> got;
  for (int step = 0; step < 3; ++step) {
    for (size_t slot = 0; slot < 3; ++slot) add(slot, 1);
    run();
    got = device_logits(forward, 3);
  }
  std::vector<float> want;
  for (size_t slot = 0; slot < 3; ++slot) {
    EXPECT_EQ(cache.length(static_cast<int64_t>(slot)), lengths[slot]);
    const auto all = cpu_logits(texts[slot], {{lengths[slot], 0}});
    want.insert(want.end(), all.end() - vocab, all.end());
  }
  expect_near(got, want);
}

// Against the CPU's cache in 8 bits. A key or value that was rounded to bf16 may be a whole step of
// 8 bits from the CPU's, which is as much as about eight roundings, and prompts round it again. The
// last piece's sequences have more blocks than their copies in bf16 have room for at once.
TEST_P(ForwardCudaTest, EightBitCacheEqualsTheCpus) {
  const int64_t vocab = model_->config.vocab_size, width = model_->config.width;
  ForwardCuda forward(
      *ctx_, *device_model_,
      {.max_tokens = 200, .max_sequences = 3, .max_length = 300, .eight_bit_cache = true});
  KvCacheCuda cache(model_->config, 3, 300, 0, /*eight_bits=*/true);
  ForwardState state(model_->config, FfnPolicy::kDense);
  KvCache cpu_cache(model_->config, 3, 300, {.eight_bits = true});
  const std::vector<int32_t> text = random_ids(300, vocab, 7);
  const auto run = [&](const std::vector<ForwardSequence>& sequences) {
    std::vector<int32_t> ids;
    for (const auto& [tokens, slot] : sequences) {
      const auto begin = text.begin() + cache.length(slot);
      ids.insert(ids.end(), begin, begin + tokens);
    }
    forward.run(ids, sequences, &cache);
    const std::vector<float> got = device_logits(forward, std::ssize(ids));
    for (const auto& [tokens, slot] : sequences)
      cache.set_length(slot, cache.length(slot) - tokens);
    forward.run(ids, sequences, &cache);
    EXPECT_EQ(device_logits(forward, std::ssize(ids)), got) << "a second run differs";
    Buffer<float> hidden(std::ssize(ids) * width);
    const MatrixF rows = hidden.matrix(std::ssize(ids), width);
    twell::forward(cpu_, *model_, state,
                   {.ids = ids, .sequences = sequences, .cache = &cpu_cache, .hidden = rows});
    std::vector<float> want(ids.size() * static_cast<size_t>(vocab));
    logits(cpu_, *model_, rows, MatrixF(want.data(), rows.rows, vocab));
    SCOPED_TRACE(testing::Message() << ids.size() << " tokens");
    expect_near(got, want, 30.0);
  };
  run({{150, 0}});
  run({{60, 2}, {137, 0}});
  run({{1, 0}, {1, 2}, {40, 1}});
  run({{153, 1}});
  run({{1, 0}, {1, 1}, {1, 2}});
  run({{2, 0}, {3, 1}, {77, 2}});
  for (int step = 0; step < 3; ++step) run({{1, 0}, {1, 1}, {1, 2}});
  run({{1, 1}});
}

// Covers every policy, with and without a cache, around the token limits of the executions.
// Regression: tile-union ran 8 cached tokens without their norm.
TEST_P(ForwardCudaTest, EveryPolicyEqualsCpu) {
  const int64_t vocab = model_->config.vocab_size;
  for (const int64_t tokens : {1, 5, 8, 9, 64, 65}) {
    const auto ids = random_ids(tokens, vocab, static_cast<uint64_t>(tokens));
    const std::vector<ForwardSequence> sequences = {{tokens, 0}};
    const auto want = cpu_logits(ids, sequences);
    for (const FfnPolicy policy : {FfnPolicy::kAuto, FfnPolicy::kDense, FfnPolicy::kSparse,
                                   FfnPolicy::kRowFused, FfnPolicy::kTileUnion}) {
      ForwardCuda forward(*ctx_, *device_model_,
                          {.max_tokens = 65, .max_sequences = 1, .max_length = 300, .ffn = policy});
      KvCacheCuda cache(model_->config, 1, 300);
      for (const bool cached : {false, true}) {
        // In the second run, auto has measured the layers.
        for (int time = 0; time < 2; ++time) {
          SCOPED_TRACE(testing::Message() << ffn_policy_name(policy) << ", " << tokens
                                          << " tokens, cached " << cached << ", time " << time);
          cache.set_length(0, 0);
          forward.run(ids, sequences, cached ? &cache : nullptr);
          expect_near(device_logits(forward, tokens), want);
          forward.ffn_plans().update(*ctx_);
        }
      }
    }
  }
}

TEST_P(ForwardCudaTest, CountsActiveNeurons) {
  ForwardCuda forward(*ctx_, *device_model_,
                      {.max_tokens = 200, .max_sequences = 1, .max_length = 200});
  const auto ids = random_ids(200, model_->config.vocab_size, 1);
  const auto counts = poisoned<int32_t>(model_->config.layers * 200);
  forward.run(ids, std::vector<ForwardSequence>{{200, 0}}, nullptr, counts.data());
  stream_->synchronize();
  std::vector<std::vector<int32_t>> want;
  cpu_logits(ids, {{200, 0}}, &want);
  const auto got = download(counts);
  // The first layer's inputs differ only by rounding, which changes the sign of few gates.
  int64_t difference = 0, total = 0;
  for (size_t m = 0; m < 200; ++m) {
    difference += std::abs(got[m] - want[0][m]);
    total += want[0][m];
  }
  EXPECT_LE(difference, total / 50);
  for (const int32_t count : got) {
    ASSERT_GE(count, 0);
    ASSERT_LE(count, model_->config.ffn);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ForwardCudaTest, testing::ValuesIn(model_cases()),
                         [](const auto& param) { return std::string(param.param.name); });

// From 1,024 tokens on, the product rotates queries and keys of heads of 64 and 128.
class ManyTokensCudaTest : public ForwardCudaTest {};

std::vector<ModelCase> many_tokens_cases() {
  std::vector<ModelCase> cases = {{"head_64", small(4, 2, 64, true, true)},
                                  {"head_128", small(2, 1, 128, true, true)}};
  for (ModelCase& c : cases) c.config.context = 1300;
  return cases;
}

TEST_P(ManyTokensCudaTest, WithAndWithoutCacheEqualsCpu) {
  const int64_t vocab = model_->config.vocab_size;
  ForwardCuda forward(*ctx_, *device_model_,
                      {.max_tokens = 1300, .max_sequences = 2, .max_length = 1300});
  const auto ids = random_ids(1290, vocab, 1);
  const std::vector<ForwardSequence> sequences = {{1230, 0}, {60, 1}};
  const auto want = cpu_logits(ids, sequences);
  forward.run(ids, sequences, nullptr);
  expect_near(device_logits(forward, 1290), want);

  // Feed all but the last token of each sequence, then the last ones.
  KvCacheCuda cache(model_->config, 2, 1300);
  std::vector<int32_t> first(ids.begin(), ids.begin() + 1229);
  first.insert(first.end(), ids.begin() + 1230, ids.begin() + 1289);
  forward.run(first, std::vector<ForwardSequence>{{1229, 0}, {59, 1}}, &cache);
  forward.run(std::vector<int32_t>{ids[1229], ids[1289]},
              std::vector<ForwardSequence>{{1, 0}, {1, 1}}, &cache);
  std::vector<float> last(want.begin() + 1229 * vocab, want.begin() + 1230 * vocab);
  last.insert(last.end(), want.end() - vocab, want.end());
  expect_near(device_logits(forward, 2), last);
}

INSTANTIATE_TEST_SUITE_P(Models, ManyTokensCudaTest, testing::ValuesIn(many_tokens_cases()),
                         [](const auto& param) { return std::string(param.param.name); });

// With 8-bit copies of the gates, a model gives what it gives without them, and with layers that
// take tokens sorted by id, which those that count rows do not.
TEST(ScreenedModelCudaTest, EqualsTheModelWithoutScreens) {
  TWELL_HOPPER_TEST();
  ModelConfig config = small(8, 4, 64, true, true);
  config.width = 512;
  config.ffn = 4099;  // padded to 4,104
  config.layers = 2;
  config.init_std = 0.02;
  Context cpu(2);
  const ModelCuda model(ctx, *rounded_model(cpu, config));
  constexpr int64_t kTokens = 9216, kLength = 256;
  const auto ids = random_ids(kTokens, config.vocab_size, 1);
  const std::vector<ForwardSequence> sequences(kTokens / kLength, {kLength, 0});
  const auto run = [&](FfnPolicy policy, std::vector<int32_t>* row_nnz) {
    ForwardPlanCuda plan{.max_tokens = kTokens,
                         .max_sequences = kTokens / kLength,
                         .max_length = kLength,
                         .ffn = FfnPolicy::kTileUnion};
    const int64_t without = ForwardCuda::bytes_needed(ctx, model.padded_config(), plan);
    plan.ffn = policy;
    const bool screens = policy != FfnPolicy::kTileUnion;
    EXPECT_EQ(ForwardCuda::bytes_needed(ctx, model.padded_config(), plan) - without >=
                  2 * 4104 * 512 + kTokens * 512,
              screens);
    ForwardCuda forward(ctx, model, plan);
    FfnPlansCuda& plans = forward.ffn_plans();
    for (int64_t layer = 0; layer < 2; ++layer) {
      plans[layer].activity = {.nnz_per_token = 100.0, .union_share = 0.9, .candidate_share = 0.01};
    }
    const auto counts = poisoned<int32_t>(2 * kTokens);
    forward.run(ids, sequences, nullptr, row_nnz == nullptr ? nullptr : counts.data());
    plans.update(ctx);
    for (int64_t layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(plans[layer].plan.execution.name == "screened", screens);
      EXPECT_EQ(plans[layer].plan.tokens, kTokens);
    }
    if (row_nnz != nullptr) *row_nnz = download(counts);
    std::vector<BF16> hidden(static_cast<size_t>(kTokens * config.width));
    TWELL_CUDA_CHECK(cudaMemcpy(hidden.data(), forward.hidden(), hidden.size() * sizeof(BF16),
                                cudaMemcpyDeviceToHost));
    return hidden;
  };
  std::vector<int32_t> want_nnz;
  const std::vector<BF16> want = run(FfnPolicy::kTileUnion, &want_nnz);
  const auto expect_near = [&](const std::vector<BF16>& got) {
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference = static_cast<double>(to_float(got[i])) - to_float(want[i]);
      error += difference * difference;
      size += static_cast<double>(to_float(want[i])) * to_float(want[i]);
    }
    EXPECT_LE(std::sqrt(error / size), std::ldexp(1.0, -8));
  };
  for (const FfnPolicy policy :
       {FfnPolicy::kTileUnion, FfnPolicy::kScreenedStrict, FfnPolicy::kScreened}) {
    std::vector<int32_t> nnz;
    expect_near(run(policy, &nnz));
    // Gates have the same bits; the second layer's input differs by the order of sums.
    EXPECT_TRUE(std::equal(nnz.begin(), nnz.begin() + kTokens, want_nnz.begin()));
    expect_near(run(policy, nullptr));
  }
}

TEST(ModelCudaTest, RefusesByName) {
  ModelConfig config = small(4, 4, 16, true, true);
  EXPECT_EQ(cuda_model_unsupported(config), "");
  config = small(4, 4, 12, true, true);
  EXPECT_THAT(cuda_model_unsupported(config), testing::HasSubstr("multiple of 8"));
}

}  // namespace
}  // namespace twell
