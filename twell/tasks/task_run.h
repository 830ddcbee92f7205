// SPDX-License-Identifier: Apache-2.0
// Runs a model on a task in batches of similar length, with progress reports and resumption.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "twell/model/scorer.h"
#include "twell/tasks/accuracy.h"
#include "twell/tasks/choice_tokens.h"
#include "twell/tasks/task_file.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct TaskProgress {
  const Task* task = nullptr;
  int64_t items = 0, items_done = 0;
  int64_t tokens = 0, tokens_done = 0;  // tokens fed to the model
  int64_t tokens_found = 0;             // part of tokens_done: by an earlier run
};

struct TaskRunOptions {
  // Folder of <task>.jsonl, which keeps the scores, saved every save_seconds and at
  // the end. A run continues scores of the same model, tokenizer, items and options found there.
  std::filesystem::path out;  // empty: scores are not kept
  // Tokens that the KV cache holds, about; at least one item. 0: a default for the device.
  int64_t batch_tokens = 0;
  bool begin_token = true;  // before every prompt, if the tokenizer's template has one
  double save_seconds = 5.0;
  std::function<void(const TaskProgress&)> on_progress;
  const std::atomic<bool>* cancel = nullptr;  // stop after the current batch once it is true
};

class TaskRunner {
 public:
  // The scorer and the tokenizer must outlive it. InputError on impossible options.
  TaskRunner(Scorer& scorer, const Tokenizer& tokenizer, const TaskRunOptions& options);
  // Estimates the work for a GPU scorer; inexact because items may have any number of choices.
  static ScorerPlan plan(const ModelConfig& config, const TaskRunOptions& options);

  // Returns nullopt when cancelled; finished scores are kept. Batches do not depend on which items
  // are already scored, so a continued run is bitwise equal to an uninterrupted one.
  std::optional<TaskAccuracy> run(const Task& task, const TaskData& data);

 private:
  struct Work;
  void run_batch(Work& work, const std::vector<size_t>& batch);

  Scorer& scorer_;
  const Tokenizer& tokenizer_;
  TaskRunOptions options_;
  ChoiceEncoder encoder_;
  std::string model_hash_;
  int64_t batches_ = 0;  // run so far
};

}  // namespace twell
