// SPDX-License-Identifier: Apache-2.0
// A micro model and text to train on, for the tests of this room.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>

#include "twell/base/test_folder.h"
#include "twell/data/chat_data.h"
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"
#include "twell/data/text_source.h"
#include "twell/model/config.h"
#include "twell/tokenizer/tokenizer.h"
#include "twell/train/engine_cpu.h"
#include "twell/train/options.h"
#include "twell/train/trainer.h"

namespace twell {

inline ModelConfig micro_config(int64_t vocab_size) {
  ModelConfig config;
  config.vocab_size = vocab_size;
  config.width = 16;
  config.ffn = 48;
  config.layers = 2;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.context = 16;
  return config;
}

// A trainer on the CPU with an engine of its own.
struct OwnEngine {
  TrainEngineCpu engine;
};
class CpuTrainer : private OwnEngine, public Trainer {
 public:
  CpuTrainer(Context& ctx, Model& model, const TrainingData& data, const TrainOptions& options,
             const std::string& data_identity, const Model* teacher = nullptr)
      : OwnEngine{{ctx, model, data, options, teacher}},
        Trainer(ctx, engine, data, options, data_identity) {}
};

inline TrainOptions micro_options(int64_t steps) {
  TrainOptions options;
  options.steps = steps;
  options.micro_batch = 2;
  options.batch_tokens = 64;  // two micro-batches of 2 x 16
  options.warmup_steps = 2;
  options.learning_rate = 1e-2;
  options.l1_coeff = 1e-3;
  options.validate_every = 0;
  options.save_every = 0;
  options.seed = 7;
  return options;
}

// What else a run can train: families, activations and losses, as changes of a micro run.
struct RunVariant {
  const char* name;
  void (*change)(ModelConfig&, TrainOptions&);
};
inline void PrintTo(const RunVariant& variant, std::ostream* out) { *out << variant.name; }

// The activation leaves no zeros: no penalty, no dead neurons.
inline void make_smooth(Activation activation, ModelConfig& config, TrainOptions& options) {
  config.activation = activation;
  options.l1_coeff = 0.0;
  options.reinit_dead = false;
}
inline void make_fatrelu(ModelConfig& config) {
  config.activation = Activation::kFatRelu;
  config.activation_threshold = 0.002;  // products of micro models are small
}

inline constexpr RunVariant kRunVariants[] = {
    {"silu", [](auto& c, auto& o) { make_smooth(Activation::kSilu, c, o); }},
    {"gelu", [](auto& c, auto& o) { make_smooth(Activation::kGelu, c, o); }},
    {"gelu_tanh", [](auto& c, auto& o) { make_smooth(Activation::kGeluTanh, c, o); }},
    {"quick_gelu", [](auto& c, auto& o) { make_smooth(Activation::kQuickGelu, c, o); }},
    {"blend",
     [](auto&, auto& o) {
       o.relufy_from = Activation::kSilu;
       o.relufy_steps = 4;
     }},
    {"distill", [](auto&, auto& o) { o.distill = 0.5; }},
    {"blend_and_distill",
     [](auto&, auto& o) {
       o.relufy_from = Activation::kGelu;
       o.relufy_steps = 4;
       o.distill = 0.3;
     }},
    {"qwen3",
     [](auto& c, auto&) {
       c.family = Family::kQwen3;
       c.qk_norm = true;
     }},
    {"qwen2",
     [](auto& c, auto&) {
       c.family = Family::kQwen2;
       c.qkv_bias = true;
     }},
    {"window",
     [](auto& c, auto&) {
       c.family = Family::kMistral;
       c.sliding_window = 5;
     }},
    {"window_of_a_layer",
     [](auto& c, auto&) {
       c.family = Family::kQwen3;
       c.qk_norm = true;
       c.sliding_window = 5;
       c.full_attention = {true, false};
     }},
    {"window_and_documents",
     [](auto& c, auto& o) {
       c.family = Family::kMistral;
       c.sliding_window = 5;
       o.document_mask = true;
     }},
    {"biases", [](auto& c, auto&) { c.qkv_bias = c.o_bias = c.mlp_bias = true; }},
    {"odd_ffn", [](auto& c, auto&) { c.ffn = 45; }},
    {"odd_ffn_with_biases",
     [](auto& c, auto&) {
       c.qkv_bias = c.o_bias = c.mlp_bias = true;
       c.ffn = 45;
     }},
    {"relu2", [](auto& c, auto&) { c.activation = Activation::kRelu2; }},
    {"arcee",
     [](auto& c, auto&) {
       c.family = Family::kArcee;
       c.activation = Activation::kRelu2;
       c.gated = false;
     }},
    {"fatrelu",
     [](auto& c, auto&) {
       c.family = Family::kProSparse;
       make_fatrelu(c);
     }},
    {"drelu",
     [](auto& c, auto&) {
       c.family = Family::kBamboo;
       c.activation = Activation::kDRelu;
     }},
    {"phonelm", [](auto& c, auto&) { c.family = Family::kPhoneLm; }},
    {"minicpm",
     [](auto& c, auto&) {
       c.family = Family::kMiniCpm;
       make_fatrelu(c);
       c.embedding_scale = 12.0;
       c.depth_scale = 1.4;
       c.base_width = 8;
     }},
};
inline std::string variant_name(const testing::TestParamInfo<RunVariant>& variant) {
  return variant.param.name;
}

// Writes a tokenizer of 300 tokens and shards of a few thousand tokens into a folder.
struct MicroData {
  explicit MicroData(const std::filesystem::path& folder)
      : tokenizer(learn()), shards(write(folder, tokenizer), tokenizer) {}

  Tokenizer tokenizer;
  ShardSet shards;

 private:
  static std::string document(int index) {
    std::string text;
    for (int i = 0; i < 40; ++i) {
      text += "line " + std::to_string(index * i) + " of document " + std::to_string(index) + "\n";
    }
    return text;
  }
  static Tokenizer learn() {
    BpeTrainingOptions options;
    options.vocab_size = 300;
    int index = 0;
    return train_bpe(options, [&index](std::string& text) {
      text = document(index);
      return index++ < 20;
    });
  }
  static std::filesystem::path write(const std::filesystem::path& folder,
                                     const Tokenizer& tokenizer) {
    const std::filesystem::path text = folder / "text";
    std::filesystem::create_directories(text);
    for (int i = 0; i < 20; ++i) {
      std::ofstream(text / (std::to_string(i) + ".txt")) << document(i);
    }
    TextSourceOptions options;
    options.paths = {text};
    TextSource source(options);
    TokenizeOptions tokenize;
    tokenize.validation_fraction = 0.2;
    write_shards(source, TokenEncoder::of(tokenizer), folder / "shards", tokenize);
    return folder / "shards";
  }
};

// Conversations of many lengths, in sequences of so many tokens; `folder` gets their file.
inline std::unique_ptr<ChatData> micro_talks(Context& ctx, const std::filesystem::path& folder,
                                             const Tokenizer& tokenizer, int64_t length) {
  const std::filesystem::path file = folder / "talks.jsonl";
  std::ofstream out(file);
  for (int i = 0; i < 60; ++i) {
    const std::string words(static_cast<size_t>(i % 9), 'q');
    out << R"({"prompt": ")" << words << R"(", "completion": "of )" << i << "\"}\n";
  }
  out.close();
  const ChatTemplate turns = ChatTemplate::from_files(
      {{"chat_template.jinja",
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"}});
  return std::make_unique<ChatData>(
      ctx, turns, tokenizer,
      ChatDataOptions{.file = file, .length = length, .validation_fraction = 0.3});
}

}  // namespace twell
