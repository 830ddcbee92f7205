// SPDX-License-Identifier: Apache-2.0
// Multiple-choice tasks against values that transformers computed one pair of texts at a time
// (golden/make_tasks_golden.py). Also tests stopping and continuing an evaluation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/data/test_files.h"
#include "twell/model/scorer_cpu.h"
#include "twell/tasks/task_run.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class TasksGolden : public testing::Test {
 protected:
  static fs::path golden() { return fs::path(TWELL_SOURCE_DIR) / "tests" / "golden" / "tasks"; }

  TaskData data(const Task& task) const { return load_task(task, golden() / "data"); }
  TaskRunner runner(const TaskRunOptions& options) {
    return TaskRunner(scorer_, tokenizer_, options);
  }
  json rows(const fs::path& path) const {
    json out = json::array();
    std::istringstream text(read_file(path));
    for (std::string line; std::getline(text, line);) out.push_back(json::parse(line));
    return out;
  }
  void compare(const char* key, bool begin_token) {
    const json expected = json::parse(read_file(golden() / "golden.json")).at(key);
    TaskRunner run = runner({.out = folder_.path() / key, .begin_token = begin_token});
    for (const Task& task : all_tasks()) {
      SCOPED_TRACE(task.name);
      const json& values = expected.at(std::string(task.name));
      const TaskAccuracy accuracy = run.run(task, data(task)).value();
      const json log = rows(folder_.path() / key / (std::string(task.name) + ".jsonl"));
      ASSERT_EQ(log.size(), values["log_likelihoods"].size() + 1);
      for (size_t i = 0; i + 1 < log.size(); ++i) {
        const json& got = log[i + 1];
        const json& wanted = values["log_likelihoods"][i];
        ASSERT_EQ(got["log_likelihoods"].size(), wanted.size());
        for (size_t c = 0; c < wanted.size(); ++c) {
          // Single against double precision: a few hundred roundings of sums of this size.
          const double value = wanted[c];
          EXPECT_NEAR(got["log_likelihoods"][c].get<double>(), value,
                      3e-5 * (1.0 + std::abs(value)))
              << "item " << i << " choice " << c;
        }
        EXPECT_EQ(got["correct"].get<bool>(), values["correct"][i] == 1.0) << i;
        EXPECT_EQ(got["correct_norm"].get<bool>(), values["correct_norm"][i] == 1.0) << i;
      }
      EXPECT_DOUBLE_EQ(accuracy.acc.mean, values["acc"]);
      EXPECT_NEAR(accuracy.acc.standard_error.value(), values["acc_stderr"], 1e-15);
      ASSERT_EQ(accuracy.acc_norm.has_value(), task.has_acc_norm);
      if (!task.has_acc_norm) continue;
      EXPECT_DOUBLE_EQ(accuracy.acc_norm->mean, values["acc_norm"]);
      EXPECT_NEAR(accuracy.acc_norm->standard_error.value(), values["acc_norm_stderr"], 1e-15);
    }
  }

  TempFolder folder_;
  Context ctx_{2};
  std::unique_ptr<Model> model_ = load_model(ctx_, golden() / "model");
  ScorerCpu scorer_{ctx_, *model_};
  Tokenizer tokenizer_ = Tokenizer::load(golden() / "model" / "tokenizer.json");
};

TEST_F(TasksGolden, Plain) { compare("plain", false); }
TEST_F(TasksGolden, WithABeginToken) { compare("bos", true); }

// The hub's Parquet files and the JSON lines hold the same items and must give the same scores.
TEST_F(TasksGolden, ParquetHoldsTheSameItems) {
  for (const Task& task : all_tasks()) {
    SCOPED_TRACE(task.name);
    const TaskData lines = data(task);
    const TaskData rows = load_task(task, golden() / "parquet");
    EXPECT_EQ(rows.file.extension(), ".parquet");
    ASSERT_EQ(rows.items.size(), lines.items.size());
    for (size_t i = 0; i < rows.items.size(); ++i) {
      EXPECT_EQ(rows.items[i].line, static_cast<int64_t>(i) + 1);
      EXPECT_EQ(rows.items[i].gold, lines.items[i].gold);
      ASSERT_EQ(rows.items[i].choices.size(), lines.items[i].choices.size());
      for (size_t c = 0; c < rows.items[i].choices.size(); ++c) {
        const TaskChoice &got = rows.items[i].choices[c], &wanted = lines.items[i].choices[c];
        EXPECT_EQ(got.context, wanted.context);
        EXPECT_EQ(got.continuation, wanted.continuation);
        EXPECT_EQ(got.characters, wanted.characters);
      }
    }
    EXPECT_EQ(load_task(task, golden() / "parquet", 2).items.size(), 2u);
  }
}

TEST_F(TasksGolden, BatchesDoNotChangeTheScores) {
  const Task& task = find_task("arc_challenge");
  std::vector<json> logs;
  for (const int64_t tokens : {1, 200, 100000}) {
    const fs::path out = folder_.path() / std::to_string(tokens);
    ASSERT_TRUE(runner({.out = out, .batch_tokens = tokens}).run(task, data(task)).has_value());
    logs.push_back(rows(out / "arc_challenge.jsonl"));
  }
  for (size_t i = 1; i < logs[0].size(); ++i) {
    for (size_t c = 0; c < logs[0][i]["log_likelihoods"].size(); ++c) {
      const double first = logs[0][i]["log_likelihoods"][c];
      for (const json& log : logs) {
        EXPECT_NEAR(log[i]["log_likelihoods"][c].get<double>(), first, 1e-5 * std::abs(first));
      }
    }
  }
}

TEST_F(TasksGolden, StoppedAndContinuedIsTheSame) {
  const Task& task = find_task("commonsense_qa");
  const TaskData items = data(task);
  const auto options = [&](const char* name) {
    TaskRunOptions out;
    out.out = folder_.path() / name;
    out.batch_tokens = 1;  // one item per batch
    return out;
  };
  ASSERT_TRUE(runner(options("whole")).run(task, items).has_value());

  const std::atomic<bool> cancel{true};
  TaskRunOptions stopped = options("part");
  stopped.cancel = &cancel;
  int64_t fed = 0;
  for (int64_t run = 0; run < 2; ++run) {  // each run completes one batch
    stopped.on_progress = [&](const TaskProgress& progress) {
      EXPECT_EQ(progress.items_done, run + 1);
      EXPECT_EQ(progress.tokens_found, fed);
      fed = progress.tokens_done;
    };
    EXPECT_FALSE(runner(stopped).run(task, items).has_value());
    EXPECT_EQ(std::ssize(rows(stopped.out / "commonsense_qa.jsonl")), run + 2);
  }
  ASSERT_TRUE(runner(options("part")).run(task, items).has_value());
  EXPECT_EQ(read_file(folder_.path() / "part" / "commonsense_qa.jsonl"),
            read_file(folder_.path() / "whole" / "commonsense_qa.jsonl"));
  // All results are saved, so the model does not run again.
  TaskRunOptions again = options("part");
  again.on_progress = [](const TaskProgress&) { FAIL() << "ran a batch"; };
  EXPECT_TRUE(runner(again).run(task, items).has_value());
}

TEST_F(TasksGolden, ScoresOfSomethingElseAreRefused) {
  using testing::HasSubstr;
  using testing::ThrowsMessage;
  const Task& task = find_task("piqa");
  const TaskData items = data(task);
  const fs::path out = folder_.path();
  ASSERT_TRUE(runner({.out = out}).run(task, items).has_value());
  EXPECT_THAT([&] { runner({.out = out, .begin_token = false}).run(task, items); },
              ThrowsMessage<InputError>(HasSubstr("scores of another bos (true, now false)")));
  TaskData fewer = load_task(task, golden() / "data", 2);
  EXPECT_THAT([&] { runner({.out = out}).run(task, fewer); },
              ThrowsMessage<InputError>(HasSubstr("another items")));
  model_->flat[0] += 1.0f;
  EXPECT_THAT([&] { runner({.out = out}).run(task, items); },
              ThrowsMessage<InputError>(HasSubstr("another checkpoint")));
  folder_.write("piqa.jsonl", "{\"task\": ");
  EXPECT_THAT([&] { runner({.out = out}).run(task, items); },
              ThrowsMessage<InputError>(HasSubstr("piqa.jsonl is damaged")));
}

TEST_F(TasksGolden, DamagedWeightsAreNamed) {
  for (float& value : model_->flat.span()) value = std::nanf("");
  const Task& task = find_task("piqa");
  EXPECT_THROW(runner({}).run(task, data(task)), InputError);
}

}  // namespace
}  // namespace twell
