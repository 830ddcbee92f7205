// SPDX-License-Identifier: Apache-2.0
#include "twell/model/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "twell/base/error.h"
#include "twell/base/rng.h"
#include "twell/model/kv_cache.h"

namespace twell {
namespace {

ModelConfig small_config() {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = 100;
  config.width = 32;
  config.ffn = 40;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 6;
  return config;
}

TEST(Weights, TableCoversTheFlatBuffer) {
  for (const bool gated : {true, false}) {
    for (const bool tied : {true, false}) {
      ModelConfig config = small_config();
      config.gated = gated;
      config.tied_embeddings = tied;
      config.qkv_bias = tied;
      config.qk_norm = gated;
      config.o_bias = config.mlp_bias = tied;
      int64_t next = 0;
      for (const ParamSpec& spec : parameter_table(config)) {
        EXPECT_EQ(spec.offset, next) << spec.name;
        next += spec.size();
      }
      EXPECT_EQ(next, config.parameter_count());
      EXPECT_EQ(next, flat_size(parameter_table(config)));
    }
  }
}

// Without padding the tensor behind biases of so many neurons would begin where GPUs cannot read
// it.
TEST(Weights, EveryTensorBeginsAtAMultipleOfEightValues) {
  ModelConfig config = small_config();
  config.head_dim = 8;
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  config.ffn = 43;
  const Model model(config);
  int64_t values = 0;
  std::vector<float> marked(static_cast<size_t>(model.flat.size()));
  for (const ParamSpec& spec : model.table) {
    EXPECT_EQ(spec.offset % 8, 0) << spec.name;
    values += spec.size();
    std::fill_n(marked.begin() + spec.offset, spec.size(), 1.0f);
  }
  EXPECT_EQ(values, config.parameter_count());
  EXPECT_EQ(values, std::count(marked.begin(), marked.end(), 1.0f));
  EXPECT_EQ(model.flat.size(), values + config.layers * 2 * 5);
}

TEST(Weights, ViewsAreThePiecesOfTheTable) {
  ModelConfig config = small_config();
  config.tied_embeddings = false;
  const Model model(config);
  const auto offset = [&](const std::string& name) {
    for (const ParamSpec& spec : model.table) {
      if (spec.name == name) return spec.offset;
    }
    throw Error(name);
  };
  const LayerMatrices<const float>& layer = model.weights.layers[1];
  const float* flat = model.flat.data();
  EXPECT_EQ(layer.w_q.data, flat + offset("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_EQ(layer.w_k.data, flat + offset("model.layers.1.self_attn.k_proj.weight"));
  EXPECT_EQ(layer.w_k.rows, 12);
  EXPECT_EQ(layer.w_v.data, flat + offset("model.layers.1.self_attn.v_proj.weight"));
  EXPECT_EQ(layer.w_qkv.data, layer.w_q.data);
  EXPECT_EQ(layer.w_qkv.row(24), layer.w_k.data);
  EXPECT_EQ(layer.w_qkv.row(36), layer.w_v.data);
  EXPECT_EQ(layer.w_qkv.rows, 48);
  EXPECT_EQ(layer.w_o.cols, 24);
  EXPECT_EQ(layer.ffn.w_down.data, flat + offset("model.layers.1.mlp.down_proj.weight"));
  EXPECT_EQ(layer.ffn.w_down.rows, 40);
  EXPECT_EQ(layer.ffn_norm, flat + offset("model.layers.1.post_attention_layernorm.weight"));
  EXPECT_EQ(model.weights.head.data, flat + offset("lm_head.weight"));
}

TEST(Weights, BiasesAndHeadNormsAreViewedWhereTheConfigurationHasThem) {
  ModelConfig config = small_config();
  EXPECT_EQ(Model(config).weights.layers[1].b_qkv, nullptr);
  EXPECT_EQ(Model(config).weights.layers[1].q_norm, nullptr);
  config.qkv_bias = config.o_bias = config.mlp_bias = config.qk_norm = true;
  config.activation = Activation::kSilu;
  const Model model(config);
  const LayerMatrices<const float>& layer = model.weights.layers[1];
  const auto found = [&](const std::string& name) {
    const auto spec = std::find_if(model.table.begin(), model.table.end(),
                                   [&](const ParamSpec& s) { return s.name == name; });
    return spec == model.table.end() ? nullptr : model.flat.data() + spec->offset;
  };
  EXPECT_EQ(layer.b_qkv, found("model.layers.1.self_attn.q_proj.bias"));
  EXPECT_EQ(layer.b_qkv + 24, found("model.layers.1.self_attn.k_proj.bias"));
  EXPECT_EQ(layer.b_qkv + 36, found("model.layers.1.self_attn.v_proj.bias"));
  EXPECT_EQ(layer.q_norm, found("model.layers.1.self_attn.q_norm.weight"));
  EXPECT_EQ(layer.k_norm, found("model.layers.1.self_attn.k_norm.weight"));
  EXPECT_EQ(layer.b_o, found("model.layers.1.self_attn.o_proj.bias"));
  EXPECT_EQ(layer.ffn.b_gate, found("model.layers.1.mlp.gate_proj.bias"));
  EXPECT_EQ(layer.ffn.b_up, found("model.layers.1.mlp.up_proj.bias"));
  EXPECT_EQ(layer.ffn.b_down, found("model.layers.1.mlp.down_proj.bias"));
  EXPECT_EQ(layer.ffn.activation.kind, Activation::kSilu);
}

TEST(Weights, TiedHeadIsTheEmbedding) {
  const Model model(small_config());
  EXPECT_EQ(model.weights.head.data, model.weights.embedding.data);
}

TEST(Weights, InitIsAFunctionOfTheSeedAlone) {
  Model a(small_config()), b(small_config()), c(small_config());
  Context one(1), three(3);
  init_weights(one, a, 5);
  init_weights(three, b, 5);
  init_weights(one, c, 6);
  const size_t bytes = static_cast<size_t>(a.flat.size()) * sizeof(float);
  EXPECT_EQ(std::memcmp(a.flat.data(), b.flat.data(), bytes), 0);
  EXPECT_NE(std::memcmp(a.flat.data(), c.flat.data(), bytes), 0);
}

TEST(Weights, InitHasTheRightSpread) {
  ModelConfig config = small_config();
  config.qkv_bias = config.qk_norm = true;
  Model model(config);
  Context ctx(1);
  init_weights(ctx, model, 1);
  for (const ParamSpec& spec : model.table) {
    double sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < spec.size(); ++i) {
      const double value = static_cast<double>(model.flat[spec.offset + i]);
      sum += value;
      squares += value * value;
    }
    const double n = static_cast<double>(spec.size()), mean = sum / n;
    if (spec.is_bias) {
      EXPECT_EQ(squares, 0.0) << spec.name;
      continue;
    }
    if (spec.is_vector) {
      EXPECT_EQ(mean, 1.0) << spec.name;
      EXPECT_EQ(squares, n) << spec.name;
      continue;
    }
    // Five standard errors of the mean and of the variance.
    EXPECT_NEAR(mean, 0.0, 5 * 0.02 / std::sqrt(n)) << spec.name;
    EXPECT_NEAR(squares / n, 0.0004, 5 * 0.0004 * std::sqrt(2.0 / n)) << spec.name;
  }
}

TEST(Weights, RefusesAnImpossibleModel) {
  ModelConfig config = small_config();
  config.kv_heads = 3;
  EXPECT_THROW(Model{config}, InputError);
}

// A token's keys as attention would read them.
std::vector<float> read_keys(const KvCache& cache, int64_t layer, int64_t slot, int64_t position) {
  AttentionSequence s;
  cache.show(layer, slot, position + 1, s);
  EXPECT_EQ(s.k.rows, position + 1);
  const int64_t row = s.blocks[position / s.block_rows] * s.block_rows + position % s.block_rows;
  const int64_t head_dim = small_config().head_dim;
  std::vector<float> out;
  for (int64_t at = row * s.k.cols; at < (row + 1) * s.k.cols; ++at) {
    out.push_back(s.k8.data == nullptr
                      ? s.k.data[at]
                      : s.k8.scale[at / head_dim] * static_cast<float>(s.k8.data[at]));
  }
  return out;
}

TEST(KvCache, TokensDoNotOverlap) {
  const ModelConfig config = small_config();
  for (const bool eight_bits : {false, true}) {
    const KvFormat format{.block_tokens = 16, .eight_bits = eight_bits};
    EXPECT_EQ(KvCache::bytes(config, 3, 20, format),
              2 * 2 * 3 * 32 * (eight_bits ? 12 + 2 * 4 : 12 * 4));
    KvCache cache(config, 3, 20, format);
    const auto for_each_token = [](const auto& fn) {
      for (int64_t i = 0; i < 2 * 3 * 20; ++i) {
        fn(i / 60, i / 20 % 3, i % 20, std::vector<float>(12, static_cast<float>(i + 1)));
      }
    };
    for_each_token([&](int64_t layer, int64_t slot, int64_t position, const auto& keys) {
      const std::vector<float> values(12, -1.0f);
      cache.store(layer, slot, position, keys.data(), values.data());
    });
    for_each_token([&](int64_t layer, int64_t slot, int64_t position, const auto& keys) {
      const std::vector<float> got = read_keys(cache, layer, slot, position);
      for (size_t i = 0; i < 12; ++i) EXPECT_FLOAT_EQ(got[i], keys[i]);
    });
  }
}

TEST(KvCache, FollowsTheTablesItIsGiven) {
  const ModelConfig config = small_config();
  KvCache cache(config, 2, 40, {.block_tokens = 16}, 5);
  EXPECT_TRUE(cache.table(1).empty());
  cache.set_table(0, std::vector<int32_t>{0, 4});
  cache.set_table(1, std::vector<int32_t>{4, 0});
  const std::vector<float> keys(12, 3.0f), values(12);
  cache.store(1, 1, 5, keys.data(), values.data());
  EXPECT_EQ(read_keys(cache, 1, 0, 16 + 5), keys);  // the same block
  EXPECT_THROW(cache.set_table(1, std::vector<int32_t>{5}), Error);
  EXPECT_THROW(cache.set_table(2, std::vector<int32_t>{1}), Error);
  EXPECT_THROW(KvCache(config, 2, 40, {.block_tokens = 24}), InputError);
}

TEST(KvCache, EightBitsAreOffByHalfAStepAtMost) {
  const ModelConfig config = small_config();
  const int64_t hd = config.head_dim;
  KvCache cache(config, 1, 40, {.eight_bits = true});
  for (int64_t position = 0; position < 40; ++position) {
    std::vector<float> keys;
    for (uint64_t i = 0; i < 12; ++i) keys.push_back(normal(1, static_cast<uint64_t>(position), i));
    if (position == 3) keys.assign(12, 0.0f);
    if (position == 4) keys[7] = std::numeric_limits<float>::infinity();
    cache.store(1, 0, position, keys.data(), keys.data());
    const std::vector<float> got = read_keys(cache, 1, 0, position);
    for (int64_t i = 0; i < 12; ++i) {
      float largest = 0.0f;
      for (int64_t j = i / hd * hd; j < (i / hd + 1) * hd; ++j) {
        largest = std::max(largest, std::abs(keys[static_cast<size_t>(j)]));
      }
      const auto at = static_cast<size_t>(i);
      if (std::isinf(largest)) {
        EXPECT_TRUE(std::isnan(got[at]));
      } else {
        EXPECT_LE(std::abs(got[at] - keys[at]), largest / 254.0f * 1.0001f);
      }
    }
  }
}

TEST(KvCache, ChecksItsBounds) {
  const ModelConfig config = small_config();
  EXPECT_THROW(KvCache(config, 0, 10), InputError);
  EXPECT_THROW(KvCache(config, 1, config.context + 1), InputError);
  KvCache cache(config, 2, 10);
  cache.set_length(1, 10);
  EXPECT_EQ(cache.length(1), 10);
  EXPECT_THROW(cache.set_length(1, 11), Error);
  EXPECT_THROW(cache.set_length(2, 1), Error);
}

}  // namespace
}  // namespace twell
