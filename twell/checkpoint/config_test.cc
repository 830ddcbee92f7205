// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/config_json.h"

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

std::string config_refusal(const json& config) {
  try {
    parse_config(config, "config.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// A configuration with this value of a key is refused with a message that contains `words`.
void expect_refused(const char* key, const json& value, const std::string& words) {
  json config = hugging_face_config();
  config[key] = value;
  EXPECT_THAT(config_refusal(config), HasSubstr("config.json")) << key << " " << value;
  EXPECT_THAT(config_refusal(config), HasSubstr(words)) << key << " " << value;
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

// The configuration files of each family, abridged.
TEST(Config, ReadsTheFamilies) {
  const auto read = [](const char* text) { return parse_config(json::parse(text), "config.json"); };
  const ModelConfig llama = read(R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"],
      "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
      "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16,
      "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-05,
      "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                       "original_max_position_embeddings": 8192, "rope_type": "llama3"},
      "eos_token_id": [7, 8, 9], "pretraining_tp": 1, "attention_dropout": 0.0,
      "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true})");
  EXPECT_EQ(llama.activation, Activation::kSilu);
  EXPECT_EQ(llama.rope_scaling,
            (RopeScaling{.type = RopeType::kLlama3, .factor = 32.0, .original_context = 8192}));
  EXPECT_EQ(llama.eos_token, 7);
  EXPECT_EQ(llama.more_eos_tokens, (std::vector<int64_t>{8, 9}));

  const std::string sizes = R"("hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
      "num_attention_heads": 8, "vocab_size": 100, )";
  const auto family = [&](const std::string& rest) { return read(("{" + sizes + rest).c_str()); };
  const ModelConfig mistral = family(R"("model_type": "mistral"})");
  EXPECT_EQ(mistral.family, Family::kMistral);
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_EQ(mistral.context, 131072);
  EXPECT_EQ(mistral.kv_heads, 8);
  EXPECT_EQ(family(R"("model_type": "mistral", "sliding_window": null})").sliding_window, 0);

  const ModelConfig qwen2 = family(R"("model_type": "qwen2", "num_key_value_heads": 2,
      "sliding_window": 32768, "use_sliding_window": false, "max_window_layers": 21,
      "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}})");
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_EQ(qwen2.sliding_window, 0);
  EXPECT_EQ(qwen2.rope_scaling.type, RopeType::kYarn);
  EXPECT_EQ(qwen2.rope_scaling.original_context, 16384);
  EXPECT_EQ(family(R"("model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 512,
      "use_sliding_window": true, "max_window_layers": 0})")
                .window_of(0),
            512);
  EXPECT_EQ(family(R"("model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 512,
      "use_sliding_window": true})")
                .sliding_window,
            0);  // max_window_layers is 28, so that the one layer has no window

  const ModelConfig qwen3 = family(R"("model_type": "qwen3", "num_key_value_heads": 2,
      "attention_bias": false, "layer_types": ["full_attention"]})");
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_EQ(qwen3.head_dim, 128);
}

TEST(Config, WindowsOfSomeLayers) {
  const auto windows = [](const char* rest) {
    json object = json::parse(R"({"model_type": "qwen3", "hidden_size": 64, "vocab_size": 100,
        "intermediate_size": 83, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_hidden_layers": 3, "sliding_window": 16, "use_sliding_window": true})");
    object.update(json::parse(rest));
    const ModelConfig config = parse_config(object, "config.json");
    EXPECT_EQ(parse_config(config_to_json(config), "x"), config);
    return std::vector<int64_t>{config.window_of(0), config.window_of(1), config.window_of(2)};
  };
  using Windows = std::vector<int64_t>;
  EXPECT_EQ(windows(R"({"max_window_layers": 1})"), (Windows{0, 16, 16}));
  EXPECT_EQ(windows(R"({"max_window_layers": 0})"), (Windows{16, 16, 16}));
  EXPECT_EQ(windows(R"({"max_window_layers": 3})"), (Windows{0, 0, 0}));
  // layer_types take precedence.
  EXPECT_EQ(windows(R"({"max_window_layers": 3, "layer_types":
      ["sliding_attention", "full_attention", "sliding_attention"]})"),
            (Windows{16, 0, 16}));
  EXPECT_THROW(windows(R"({"layer_types": ["full_attention"]})"), InputError);
  EXPECT_THROW(windows(R"({"model_type": "mistral", "layer_types":
      ["sliding_attention", "full_attention", "sliding_attention"]})"),
               InputError);
}

TEST(Config, FamiliesAndOptionsRoundTrip) {
  for (const Family family :
       {Family::kLlama, Family::kMistral, Family::kQwen2, Family::kQwen3, Family::kArcee,
        Family::kPhoneLm, Family::kProSparse, Family::kBamboo, Family::kMiniCpm}) {
    ModelConfig config = preset_config("tiny");
    config.family = family;
    config.qkv_bias = family == Family::kQwen2;
    config.qk_norm = family == Family::kQwen3;
    config.head_dim = 128;
    config.activation = Activation::kGeluTanh;
    if (family == Family::kBamboo) config.activation = Activation::kDRelu;
    if (family == Family::kArcee) config.gated = false;
    if (family == Family::kMiniCpm) {
      config.embedding_scale = 12.0;
      config.depth_scale = 1.4;
      config.base_width = 64;
    }
    if (family == Family::kProSparse || family == Family::kMiniCpm) {
      config.activation = Activation::kFatRelu;
      config.activation_threshold = 0.01;
    }
    config.eos_token = 5;
    config.more_eos_tokens = {6, 7};
    config.sliding_window = family == Family::kMistral || family == Family::kQwen2 ||
                                    family == Family::kQwen3 || family == Family::kBamboo
                                ? 64
                                : 0;
    config.o_bias =
        family != Family::kMistral && family != Family::kQwen2 && family != Family::kBamboo;
    config.qkv_bias = config.qkv_bias || config.o_bias;
    config.mlp_bias =
        family == Family::kLlama || family == Family::kArcee || family == Family::kProSparse;
    config.ffn = 83;
    EXPECT_EQ(parse_config(config_to_json(config), "x"), config);
    const RopeScaling scalings[] = {
        {.type = RopeType::kLinear, .factor = 2.0},
        {.type = RopeType::kDynamic, .factor = 2.5},
        {.type = RopeType::kLlama3, .factor = 8.0, .original_context = 64, .high_freq_factor = 3.0},
        {.type = RopeType::kYarn,
         .factor = 4.0,
         .original_context = 64,
         .beta_fast = 16.0,
         .attention_factor = 1.5,
         .truncate = false},
        {.type = RopeType::kYarn,
         .factor = 4.0,
         .original_context = 64,
         .mscale = 0.7,
         .mscale_all_dim = 0.9}};
    for (const RopeScaling& scaling : scalings) {
      config.rope_scaling = scaling;
      EXPECT_EQ(parse_config(config_to_json(config), "x"), config);
    }
  }
}

TEST(Config, SparsityKeysDecideTheLayerOfPublishedSparseModels) {
  json config = hugging_face_config();
  config["model_type"] = "llama_sparse_relu";
  config["architectures"] = {"SparseLlamaForCausalLM"};
  config["sparsity_gated_mlp"] = false;
  config["sparsity_new_intermediate_size"] = 192;
  config["sparsity_l1_coeff"] = 2e-5;
  config["auto_map"] = {{"AutoConfig", "modeling.SparseLlamaConfig"}};
  const ModelConfig read = parse_config(config, "x");
  EXPECT_FALSE(read.gated);
  EXPECT_EQ(read.ffn, 192);
  EXPECT_EQ(read.activation, Activation::kRelu);
  config["sparsity_use_hybrid_kernel"] = true;
  EXPECT_THAT(config_refusal(config), HasSubstr("sparsity_use_hybrid_kernel true"));
  config = hugging_face_config();
  config["sparsity_l1_coeff"] = 2e-5;
  EXPECT_THAT(config_refusal(config), HasSubstr("sparsity_l1_coeff"));
}

TEST(Config, PublishedSparseModelsAreReluWhateverTheySay) {
  json config = hugging_face_config();
  config["model_type"] = "llama_sparse_relu";
  config["architectures"] = {"SparseLlamaForCausalLM"};
  config["hidden_act"] = "silu";
  EXPECT_EQ(config_refusal(config), "");
}

TEST(Config, Relu2IsReadAndWritten) {
  json config = hugging_face_config();
  config["hidden_act"] = "relu2";
  const ModelConfig read = parse_config(config, "x");
  EXPECT_EQ(read.activation, Activation::kRelu2);
  EXPECT_EQ(config_to_json(read)["hidden_act"], "relu2");
}

// Keys and defaults of MiniCPM, by which its residual stream is kept divided by what its parts are
// multiplied by.
TEST(Config, ScalesOfMiniCpm) {
  json config = hugging_face_config();
  config["model_type"] = "minicpm";
  config.erase("architectures");
  config.erase("tie_word_embeddings");
  config["num_hidden_layers"] = 4;
  config["hidden_act"] = "fatrelu";
  config["hidden_act_param"] = 0.01;
  config["rms_norm_eps"] = 1e-5;
  const ModelConfig plain = parse_config(config, "x");
  EXPECT_TRUE(plain.tied_embeddings);
  EXPECT_EQ(plain.part_scale(), 0.5);
  EXPECT_EQ(plain.hidden_scale(), 1.0f / static_cast<float>(plain.width));
  config["scale_emb"] = 12;
  config["scale_depth"] = 0.5;
  config["dim_model_base"] = 2;
  const ModelConfig read = parse_config(config, "x");
  EXPECT_EQ(read.stream_embedding_scale(), 48.0f);
  EXPECT_EQ(read.stream_eps(), static_cast<float>(16.0 * 1e-5));
  EXPECT_EQ(read.hidden_scale(), 2.0f / static_cast<float>(read.width));
  EXPECT_EQ(config_to_json(read)["scale_depth"], 0.5);
  for (const auto& [key, value] : {std::pair<const char*, json>{"scale_depth", 0},
                                   {"scale_emb", -1},
                                   {"dim_model_base", 0},
                                   {"num_experts", 8}}) {
    json refused = config;
    refused[key] = value;
    EXPECT_THAT(config_refusal(refused), HasSubstr(key));
  }
  config["model_type"] = "llama";
  EXPECT_THAT(config_refusal(config), HasSubstr("dim_model_base (2) is not understood"));
}

TEST(Config, RefusesByName) {
  expect_refused("hidden_act", "mish", "hidden_act: activation \"mish\" is not supported");
  expect_refused("model_type", "gemma", "model_type \"gemma\"");
  expect_refused("model_type", 3, "\"model_type\" must be a string, got 3");
  expect_refused("architectures", {"MixtralForCausalLM"}, "MixtralForCausalLM");
  expect_refused("attention_bias", 1, "\"attention_bias\" must be true or false, got 1");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    json mistral = hugging_face_config();
    mistral["model_type"] = "mistral";
    mistral.erase("architectures");
    mistral[key] = true;
    EXPECT_THAT(config_refusal(mistral), HasSubstr(fmt::format("{} true is not supported", key)));
  }
  expect_refused("rope_scaling", {{"rope_type", "llama3"}}, "factor of rope_scaling is missing");
  expect_refused("rope_parameters", {{"type", "longrope"}}, "\"longrope\"");
  expect_refused("rope_scaling", {{"type", "linear"}, {"factor", 0.5}}, "factor of the rope");
  expect_refused("rope_scaling", {{"type", "default"}, {"mrope_section", {1}}}, "mrope_section");
  expect_refused("sliding_window", 128, "a sliding_window is not supported with llama");
  expect_refused("layer_types", {"full_attention", "chunked_attention"}, "chunked_attention");
  expect_refused("use_mrope", true, "use_mrope true is not supported");
  expect_refused("no_rope_layers", {1, 0}, "no_rope_layers ([1,0]) is not understood");
  expect_refused("quantization_config", json::object(), "quantization_config");
  expect_refused("partial_rotary_factor", 0.5, "partial_rotary_factor");
  expect_refused("eos_token_id", {1, "2"}, "\"eos_token_id\" must be an integer, got \"2\"");
}

TEST(Config, RefusesImpossibleNumbers) {
  expect_refused("hidden_size", 0, "hidden_size must be between 1");
  expect_refused("hidden_size", -64, "-64");
  expect_refused("hidden_size", 68, "multiple of 8, got 68");
  expect_refused("hidden_size", 64.5, "\"hidden_size\" must be an integer, got 64.5");
  expect_refused("hidden_size", uint64_t{1} << 63, "must be an integer");
  expect_refused("hidden_size", int64_t{1} << 62, "hidden_size must be between");
  expect_refused("hidden_size", "64", "got \"64\"");
  expect_refused("hidden_size", nullptr, "has no \"hidden_size\"");
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
  EXPECT_THAT(config_refusal(config), HasSubstr("parameters, more than"));
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
  EXPECT_THAT(refused("[]"), HasSubstr("is not an object"));
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
