// SPDX-License-Identifier: Apache-2.0
// A model on a task: in batches of about equal length, with progress, and able to continue.
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
  int64_t tokens = 0, tokens_done = 0;  // fed to the model
  int64_t tokens_found = 0;             // of those done, by an earlier run
};

struct TaskRunOptions {
  // Where <task>.jsonl keeps the scores (score_log.h), written every few seconds and at the end. A
  // run that finds scores of the same model, tokenizer, items and options there continues them.
  std::filesystem::path out;  // empty: scores are not kept
  // Keys and values are kept for about this many, at least one item; 0: what suits the device.
  int64_t batch_tokens = 0;
  bool begin_token = true;  // in front of every prompt, where the tokenizer's template has one
  double save_seconds = 5.0;
  std::function<void(const TaskProgress&)> on_progress;
  const std::atomic<bool>* cancel = nullptr;  // stop after the current batch once it is true
};

class TaskRunner {
 public:
  // The scorer and the tokenizer must outlive it. InputError on impossible options.
  TaskRunner(Scorer& scorer, const Tokenizer& tokenizer, const TaskRunOptions& options);
  // What a scorer on a GPU will be given: about, as an item may have any number of choices.
  static ScorerPlan plan(const ModelConfig& config, const TaskRunOptions& options);

  // None when cancelled; what was scored is kept. Which items go through the model together is the
  // same whatever was scored before, so that a continued run gives the bits of an uninterrupted
  // one.
  std::optional<TaskAccuracy> run(const Task& task, const TaskData& data);

 private:
  struct Work;
  void run_batch(Work& work, const std::vector<size_t>& batch);

  Scorer& scorer_;
  const Tokenizer& tokenizer_;
  TaskRunOptions options_;
  ChoiceEncoder encoder_;
  std::string model_hash_;
  bool started_ = false;  // a batch has been scored
};

}  // namespace twell
