// SPDX-License-Identifier: Apache-2.0
#include "twell/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"

namespace twell {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json hugging_face_config() {
  return json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu",
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 100000.0,
    "rope_scaling": null, "attention_bias": false, "bos_token_id": 1, "eos_token_id": [2]})");
}

std::string refusal(const json& config) {
  try {
    parse_config(config, "config.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// The configuration with one key changed must be refused with a message that says both.
void expect_refused(const char* key, const json& value, const std::string& words) {
  json config = hugging_face_config();
  config[key] = value;
  EXPECT_THAT(refusal(config), HasSubstr("config.json: ")) << key << " " << value;
  EXPECT_THAT(refusal(config), HasSubstr(words)) << key << " " << value;
}

TEST(Config, ReadsHuggingFace) {
  const ModelConfig config = parse_config(hugging_face_config(), "config.json");
  EXPECT_EQ(config.vocab_size, 1000);
  EXPECT_EQ(config.width, 64);
  EXPECT_EQ(config.ffn, 128);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.heads, 4);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.context, 512);
  EXPECT_TRUE(config.gated);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(config.rope_theta, 100000.0);
  EXPECT_EQ(config.bos_token, 1);
  EXPECT_EQ(config.eos_token, 2);
}

TEST(Config, RoundTrips) {
  for (const bool gated : {true, false}) {
    for (const std::string& name : preset_names()) {
      ModelConfig config = preset_config(name, gated);
      config.eos_token = 7;
      config.tied_embeddings = gated;
      EXPECT_EQ(parse_config(config_to_json(config), "x"), config);
    }
  }
}

TEST(Config, ReadsBothPlacesOfRopeTheta) {
  json config = hugging_face_config();
  config.erase("rope_theta");
  EXPECT_EQ(parse_config(config, "x").rope_theta, 10000.0);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 50000.0}};
  EXPECT_EQ(parse_config(config, "x").rope_theta, 50000.0);
}

TEST(Config, PublishedSparseModelsAreReluWhateverTheySay) {
  json config = hugging_face_config();
  config["model_type"] = "llama_sparse_relu";
  config["architectures"] = {"SparseLlamaForCausalLM"};
  config["hidden_act"] = "silu";
  EXPECT_EQ(refusal(config), "");
}

TEST(Config, RefusesByName) {
  expect_refused("hidden_act", "silu", "hidden_act \"silu\" is not supported");
  expect_refused("hidden_act", nullptr, "hidden_act \"silu\"");
  expect_refused("model_type", "qwen2", "model_type \"qwen2\"");
  expect_refused("model_type", 3, "model_type must be a string, got 3");
  expect_refused("architectures", {"MixtralForCausalLM"}, "MixtralForCausalLM");
  expect_refused("attention_bias", true, "attention_bias");
  expect_refused("mlp_bias", true, "mlp_bias");
  expect_refused("rope_scaling", {{"rope_type", "llama3"}}, "rope_scaling of type \"llama3\"");
  expect_refused("rope_parameters", {{"type", "yarn"}}, "\"yarn\"");
  expect_refused("quantization_config", json::object(), "quantization_config");
  expect_refused("partial_rotary_factor", 0.5, "partial_rotary_factor");
  expect_refused("eos_token_id", {1, 2}, "eos_token_id must be one token, got [1,2]");
}

TEST(Config, RefusesImpossibleNumbers) {
  expect_refused("hidden_size", 0, "hidden_size must be between 1");
  expect_refused("hidden_size", -64, "-64");
  expect_refused("hidden_size", 68, "multiple of 8, got 68");
  expect_refused("hidden_size", 64.5, "hidden_size must be an integer, got 64.5");
  expect_refused("hidden_size", uint64_t{1} << 63, "must be an integer");
  expect_refused("hidden_size", int64_t{1} << 62, "hidden_size must be between");
  expect_refused("hidden_size", "64", "got \"64\"");
  expect_refused("hidden_size", nullptr, "hidden_size is missing");
  expect_refused("intermediate_size", 130, "multiple of 8");
  expect_refused("vocab_size", -1, "vocab_size");
  expect_refused("num_hidden_layers", 0, "num_hidden_layers");
  expect_refused("num_hidden_layers", 1'000'000, "num_hidden_layers");
  expect_refused("num_attention_heads", 0, "num_attention_heads");
  expect_refused("num_attention_heads", 3, "not a multiple of num_attention_heads 3");
  expect_refused("num_key_value_heads", 3, "num_key_value_heads must divide");
  expect_refused("head_dim", 7, "head_dim must be even");
  expect_refused("head_dim", 0, "head_dim");
  expect_refused("max_position_embeddings", 0, "max_position_embeddings");
  expect_refused("rope_theta", -1.0, "rope_theta");
  expect_refused("rope_theta", 0.5, "rope_theta");
  expect_refused("rms_norm_eps", 0.0, "rms_norm_eps");
  expect_refused("initializer_range", -0.1, "initializer_range");
  expect_refused("eos_token_id", 1000, "eos_token_id must be below vocab_size 1000");
  expect_refused("eos_token_id", -2, "eos_token_id");
}

TEST(Config, RefusesTooManyParameters) {
  json config = hugging_face_config();
  config["intermediate_size"] = 1 << 24;
  config["hidden_size"] = 1 << 20;
  config["head_dim"] = 64;
  config["num_hidden_layers"] = 1 << 16;
  EXPECT_THAT(refusal(config), HasSubstr("parameters, more than"));
}

TEST(Config, RefusesBrokenText) {
  const auto refused = [](const std::string& text) {
    try {
      parse_config_text(text, "config.json");
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused(""), HasSubstr("config.json: not valid JSON"));
  EXPECT_THAT(refused("{\"a\": 1"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused("[]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(refused("{\"a\": 1, \"a\": 2}"), HasSubstr("\"a\" appears twice"));
  EXPECT_THAT(refused(std::string(1000, '[')), HasSubstr("nested more than"));
  EXPECT_THAT(refused(std::string(2 << 20, ' ')), HasSubstr("too many"));
}

TEST(Config, PresetsAreThePublishedModels) {
  const ModelConfig config = preset_config("1.5b");
  EXPECT_EQ(config.layers, 28);
  EXPECT_EQ(config.width, 2048);
  EXPECT_EQ(config.ffn, 5632);
  EXPECT_EQ(preset_config("2b", false).ffn, 8192);
  EXPECT_EQ(preset_config("0.5b").parameter_count(),
            8 * (4 * 2048 * 2048 + 3 * 2048 * 5632 + 2 * 2048) + 49152 * 2048 + 2048);
  for (const std::string& name : preset_names()) EXPECT_NO_THROW(preset_config(name).validate());
  EXPECT_THROW(preset_config("3b"), InputError);
}

TEST(Config, FlopsOfATinyModelByHand) {
  ModelConfig config;
  config.vocab_size = 10;
  config.width = 8;
  config.ffn = 16;
  config.layers = 1;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 4;
  // q and o 2 * 8 * 8, k and v 2 * 8 * 4, FFN 3 * 8 * 16, head 80 multiply-adds; over 3 tokens
  // there are 1 + 2 + 3 keys, each met by 8 query values and 8 output values.
  EXPECT_DOUBLE_EQ(config.forward_flops_per_token(3), 2.0 * (128 + 64 + 384 + 80 + 6.0 * 16 / 3.0));
}

TEST(Config, RefusesNotANumber) {
  ModelConfig config = preset_config("tiny");
  config.rope_theta = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(config.validate(), InputError);
}

}  // namespace
}  // namespace twell
