// SPDX-License-Identifier: Apache-2.0
// Compares two models on multiple-choice tasks at the end of `twell train --relufy --tasks`.
#pragma once

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/progress_line.h"
#include "twell/model/scorer.h"
#include "twell/tasks/accuracy.h"
#include "twell/tasks/task_file.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell::cli {

struct TaskComparisonOptions {
  std::string tasks;  // comma-separated names; empty: none
  std::filesystem::path data;
  int64_t limit = 0;  // items of each task; 0: all
};

class TaskComparison {
 public:
  // Reads the items. InputError on an unknown task or missing items.
  explicit TaskComparison(const TaskComparisonOptions& options);

  bool empty() const { return rows_.empty(); }
  // InputError when an item does not fit this model.
  void check(const ModelConfig& config, const Tokenizer& tokenizer) const;
  // Runs both models. Returns false when cancelled.
  bool run(Scorer& original, Scorer& sparse, const Tokenizer& tokenizer,
           const std::atomic<bool>& cancel, ProgressLine& progress);
  // Prints the results of a finished run: acc_norm where a task has it, else acc.
  void print() const;
  nlohmann::json json() const;

 private:
  struct Row {
    const Task* task;
    TaskData data;
    TaskAccuracy original, sparse;
  };
  std::vector<Row> rows_;
};

}  // namespace twell::cli
