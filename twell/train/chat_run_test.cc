// SPDX-License-Identifier: Apache-2.0
// Training on conversations: packed ones count as each by itself, and checkpoints can chat.
#include "twell/train/chat_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/model/training.h"
#include "twell/train/micro_batches.h"
#include "twell/train/start.h"
#include "twell/train/test_run.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kTurns =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}";

class ChatRunTest : public testing::Test {
 protected:
  ChatRunTest() {
    fs::create_directories(base_);
    settings_.from = base_;
    settings_.chat_data = temp_.path() / "talks.jsonl";
    settings_.chat_template = temp_.path() / "turns.jinja";
    std::ofstream(settings_.chat_template) << kTurns;
    std::ofstream file(settings_.chat_data);
    for (int i = 0; i < 40; ++i) {
      file << R"({"prompt": "line )" << i % 7 << R"(", "completion": "of )" << i << "\"}\n";
    }
  }
  ChatRun read(const fs::path& checkpoint) {
    return read_chat_data(ctx_, settings_, config(), data_.tokenizer, checkpoint,
                          {.file = {}, .length = 48, .validation_fraction = 0.2});
  }
  ModelConfig config() const {
    ModelConfig config = micro_config(data_.tokenizer.vocab_size());
    config.context = 48;
    config.eos_token = data_.tokenizer.eos_token();
    return config;
  }
  TrainOptions options() const {
    TrainOptions options = micro_options(20);
    options.batch_tokens = 192;  // two micro-batches of 2 x 48
    options.document_mask = true;
    options.clip_norm = 0.0;
    options.l1_coeff = 0.0;
    return resolve_options(options, config());
  }

  TempFolder temp_;
  MicroData data_{temp_.path()};
  Context ctx_{1};
  fs::path base_ = temp_.path() / "base";
  RunSettings settings_;
};

// The sum of the losses of all documents, each in a forward of its own, and their gradients.
double each_alone(Context& ctx, const Model& model, std::span<const int32_t> inputs,
                  std::span<const int32_t> targets, const std::vector<int64_t>& documents,
                  int64_t step_targets, std::span<float> grads) {
  double loss = 0.0;
  size_t at = 0;
  for (const int64_t length : documents) {
    TrainingState state(model.config, {1, length});
    const auto count = static_cast<size_t>(length);
    const TrainingBatch batch{.inputs = inputs.subspan(at, count),
                              .targets = targets.subspan(at, count),
                              .step_tokens = 1000,
                              .step_targets = step_targets};
    loss += forward_backward(ctx, model, batch, state, grads).loss_sum;
    at += count;
  }
  return loss;
}

TEST_F(ChatRunTest, APackedStepIsThatOfEachConversationByItself) {
  const ChatRun chat = read(base_);
  const TrainOptions options = this->options();
  Model model(config());
  init_weights(ctx_, model, 3);
  const MicroBatches batches(*chat.data, options);
  const int64_t step_targets = batches.step_targets(1);
  std::vector<int32_t> inputs(96), targets(96);
  std::vector<int64_t> documents;
  const auto alone = [&](int64_t shift) {
    Buffer<float> grads(model.flat.size());
    double loss = 0.0;
    for (int64_t i = 0; i < 2; ++i) {
      batches.read(1, i, inputs, targets, documents);
      EXPECT_GT(documents.size(), 2u);
      documents.front() += shift;
      documents[1] -= shift;
      loss += each_alone(ctx_, model, inputs, targets, documents, step_targets, grads.span());
    }
    double squares = 0.0;
    for (const float grad : grads.span()) squares += std::pow(static_cast<double>(grad), 2.0);
    return std::pair(loss / static_cast<double>(step_targets), std::sqrt(squares));
  };
  const auto [loss, norm] = alone(0);
  // A boundary that is one token off is seen.
  EXPECT_GT(std::abs(alone(1).first - loss), 1e-5);

  CpuTrainer trainer(ctx_, model, *chat.data, options, "data");
  const StepMetrics metrics = trainer.train_step();
  EXPECT_NEAR(metrics.ce, loss, 1e-6 * loss);
  EXPECT_NEAR(metrics.grad_norm, norm, 1e-5 * norm);
  EXPECT_LT(step_targets, 192 / 2);  // the questions have none
  for (int64_t step = 1; step <= 6; ++step) {
    int64_t count = 0;
    for (int64_t i = 0; i < 2; ++i) {
      batches.read(step, i, inputs, targets, documents);
      count += std::ranges::count_if(targets, [](int32_t id) { return id >= 0; });
    }
    EXPECT_EQ(batches.step_targets(step), count) << step;
  }
}

TEST_F(ChatRunTest, LearnsAndIsValidatedOnAnswersAlone) {
  const ChatRun chat = read(base_);
  Model model(config());
  init_weights(ctx_, model, 3);
  TrainOptions options = this->options();
  options.validation_sequences = 1000;
  CpuTrainer trainer(ctx_, model, *chat.data, options, "data");
  const double before = trainer.validate();
  while (!trainer.finished()) trainer.train_step();
  EXPECT_LT(trainer.validate(), 0.8 * before);

  const int64_t count = chat.data->sequences(Split::kValidation, 48);
  std::vector<int32_t> inputs(48), targets(48);
  Buffer<float> grads(model.flat.size());
  double loss = 0.0, tokens = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    chat.data->read_sequence(Split::kValidation, i, inputs, targets);
    std::vector<int64_t> documents;
    chat.data->add_documents(Split::kValidation, i, inputs, documents);
    loss += each_alone(ctx_, model, inputs, targets, documents, 1, grads.span());
    tokens += static_cast<double>(chat.data->targets(Split::kValidation, i, 48));
  }
  EXPECT_NEAR(trainer.validate(), loss / tokens, 1e-5);
}

TEST_F(ChatRunTest, CheckpointsHaveTheTemplateAndWhatEndsAnswers) {
  std::ofstream(base_ / "generation_config.json") << R"({"eos_token_id": 7, "top_k": 5})";
  const ChatRun chat = read(base_);
  save_text_files(temp_.path(), config(), data_.tokenizer, chat.text_files);
  const auto json = [&](const char* name) {
    return nlohmann::json::parse(std::ifstream(temp_.path() / name));
  };
  EXPECT_EQ(json("generation_config.json")["eos_token_id"],
            nlohmann::json({7, data_.tokenizer.eos_token()}));
  EXPECT_EQ(json("generation_config.json")["top_k"], 5);
  EXPECT_EQ(json("tokenizer_config.json")["eos_token"], "<|endoftext|>");
  EXPECT_EQ(ChatTemplate::load(temp_.path()).render({{"user", "a"}}, true),
            "user: a<|endoftext|>assistant: ");
  // A run that goes on takes them from there, and reads the same.
  std::ofstream(settings_.chat_template) << "other";
  const ChatRun again = read(temp_.path());
  EXPECT_EQ(again.data->identity(), chat.data->identity());
  EXPECT_EQ(again.text_files, chat.text_files);
}

TEST_F(ChatRunTest, FilesThatACheckpointLacks) {
  TextFiles files;
  complete_text_files(files, config(), data_.tokenizer);
  const auto tokens = nlohmann::json::parse(files.at("tokenizer_config.json"));
  EXPECT_EQ(tokens["pad_token"], "<|endoftext|>");
  EXPECT_EQ(tokens["model_max_length"], 48);
  EXPECT_FALSE(tokens.contains("bos_token"));
  ModelConfig more = config();
  more.more_eos_tokens = {5};
  TextFiles kept = {{"tokenizer_config.json", "mine"}};
  complete_text_files(kept, more, data_.tokenizer);
  EXPECT_EQ(kept.at("tokenizer_config.json"), "mine");
  const auto generation = nlohmann::json::parse(kept.at("generation_config.json"));
  EXPECT_EQ(generation["eos_token_id"], nlohmann::json({data_.tokenizer.eos_token(), 5}));
  EXPECT_EQ(generation["max_length"], 48);
  // A token of its own for padding, and one that begins texts.
  BpeTrainingOptions options;
  options.vocab_size = 262;
  options.special_tokens = {"</s>", "<pad>"};
  int left = 2;
  const Tokenizer padded = train_bpe(options, [&](std::string& text) {
    text = "one and two and one and two";
    return left-- > 0;
  });
  TextFiles others;
  complete_text_files(others, config(), padded);
  EXPECT_EQ(nlohmann::json::parse(others.at("tokenizer_config.json"))["pad_token"], "<pad>");
}

TEST_F(ChatRunTest, TextFilesOfACheckpointAreKept) {
  const TextFiles files = {{"tokenizer_config.json", "{}"},
                           {"generation_config.json", "{}"},
                           {"special_tokens_map.json", "{}"},
                           {"chat_template.jinja", "a"},
                           {"additional_chat_templates/tool_use.jinja", "b"}};
  const fs::path to = temp_.path() / "to";
  fs::create_directories(to);
  save_text_files(to, config(), data_.tokenizer, files);
  std::ofstream(to / "additional_chat_templates" / "notes.txt") << "no template";
  EXPECT_EQ(text_files_of(to), files);
}

TEST_F(ChatRunTest, SettingsThatDoNotGoTogether) {
  RunSettings settings;
  settings.chat_template = "turns.jinja";
  const auto fault = [&] {
    try {
      requested_options(settings, config());
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(fault(), HasSubstr("--chat-template goes with --chat-data"));
  settings.chat_data = "talks.jsonl";
  EXPECT_THAT(fault(), HasSubstr("add --from DIR"));
}

}  // namespace
}  // namespace twell
