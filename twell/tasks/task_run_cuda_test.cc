// SPDX-License-Identifier: Apache-2.0
// Compares task scores on the GPU with the CPU's, on the same bf16 weights.
#include "twell/tasks/task_run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <utility>

#include "twell/base/cuda_gtest.h"
#include "twell/base/file.h"
#include "twell/base/rng.h"
#include "twell/base/test_folder.h"
#include "twell/model/scorer_cpu.h"
#include "twell/model/scorer_cuda.h"
#include "twell/tasks/choice_scores.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

ModelConfig config() {
  ModelConfig out;
  out.vocab_size = 257;
  out.width = 32;
  out.ffn = 96;
  out.layers = 2;
  out.heads = 4;
  out.kv_heads = 2;
  out.head_dim = 8;
  out.context = 64;
  out.init_std = 0.3;
  return out;
}

std::string random_text(uint64_t length, uint64_t seed) {
  std::string text;
  for (uint64_t i = 0; i < length; ++i) {
    text += static_cast<char>('a' + uniform_below(seed, 0, i, 26));
  }
  return text;
}

TaskData random_items(size_t count) {
  TaskData data{.file = "items", .hash = "of these items", .items = {}};
  for (uint64_t i = 0; i < count; ++i) {
    TaskItem item{.line = static_cast<int64_t>(i) + 1, .choices = {}, .gold = 0};
    const std::string context = random_text(1 + i * 11 % 40, i);
    for (uint64_t choice = 0; choice < 2 + i % 3; ++choice) {
      item.choices.push_back({context, random_text(1 + (i + 3 * choice) % 9, 100 * i + choice), 4});
    }
    data.items.push_back(std::move(item));
  }
  return data;
}

class TaskRunCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    TWELL_SKIP_WITHOUT_GPU();
    stream_ = std::make_unique<CudaStream>();
    ctx_ = std::make_unique<CudaContext>(stream_->get());
    init_weights(cpu_, model_, 1);
    for (float& value : model_.flat.span()) value = to_float(to_bf16(value));
    device_model_ = std::make_unique<ModelCuda>(*ctx_, model_);
  }

  Context cpu_{2};
  Tokenizer tokenizer_ = byte_tokenizer();
  Model model_{config()};
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaContext> ctx_;
  std::unique_ptr<ModelCuda> device_model_;
};

TEST_F(TaskRunCudaTest, ScoresEqualCpu) {
  const ChoiceEncoder encoder(tokenizer_, model_.config, false);
  std::vector<ChoiceGroup> groups;
  for (const TaskItem& item : random_items(40).items) {
    for (ChoiceGroup& group : encoder.encode(item, "item")) groups.push_back(std::move(group));
  }
  ScorerCpu cpu(cpu_, model_);
  ScorerCuda gpu(*ctx_, *device_model_);
  const auto want = continuation_scores(cpu, groups), got = continuation_scores(gpu, groups);
  ASSERT_EQ(got.size(), want.size());
  double worst = 0.0;
  for (size_t g = 0; g < want.size(); ++g) {
    ASSERT_EQ(got[g].size(), want[g].size());
    for (size_t i = 0; i < want[g].size(); ++i) {
      // Logits differ by some hundredths of their size (session_cuda_test), over a few tokens.
      EXPECT_NEAR(got[g][i], want[g][i], 0.05 * std::abs(want[g][i]) + 0.1) << g << " " << i;
      worst = std::max(worst, std::abs(got[g][i] - want[g][i]));
    }
  }
  EXPECT_GT(worst, 0.0);  // the scores come from different code
}

TEST_F(TaskRunCudaTest, StoppedAndContinuedIsTheSame) {
  const TempFolder folder;
  const TaskData data = random_items(30);
  const Task& task = find_task("piqa");
  const auto run = [&](const char* name, const std::atomic<bool>* cancel) {
    ScorerCuda scorer(*ctx_, *device_model_);
    TaskRunner runner(
        scorer, tokenizer_,
        {.out = folder.path() / name, .batch_tokens = 300, .begin_token = false, .cancel = cancel});
    return runner.run(task, data);
  };
  ASSERT_TRUE(run("whole", nullptr).has_value());
  const std::atomic<bool> cancel{true};
  // Each run repeats the first batch, which decides how the layers run, and adds one more.
  int64_t runs = 0;
  while (!run("part", &cancel).has_value()) ASSERT_LT(++runs, 100);
  EXPECT_GE(runs, 1);
  EXPECT_EQ(read_file(folder.path() / "part" / "piqa.jsonl"),
            read_file(folder.path() / "whole" / "piqa.jsonl"));
}

TEST_F(TaskRunCudaTest, WeightsHaveAHashOfTheirOwn) {
  ScorerCuda scorer(*ctx_, *device_model_);
  const std::string hash = scorer.weights_hash();
  EXPECT_EQ(hash, ScorerCuda(*ctx_, *device_model_).weights_hash());
  model_.flat[7] += 1.0f;
  const ModelCuda other(*ctx_, model_);
  EXPECT_NE(hash, ScorerCuda(*ctx_, other).weights_hash());
}

}  // namespace
}  // namespace twell
