// SPDX-License-Identifier: Apache-2.0
// Two models on multiple-choice tasks: the end of `twell train --relufy --tasks`.
#pragma once

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/progress_line.h"
#include "twell/base/context.h"
#include "twell/model/weights.h"
#include "twell/tasks/accuracy.h"
#include "twell/tasks/task_file.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell::cli {

struct TaskComparisonOptions {
  std::string tasks;  // names with commas between; empty: none
  std::filesystem::path data;
  int64_t limit = 0;  // items of each task; 0: all
};

class TaskComparison {
 public:
  // Reads the items. InputError on a task that is not known, or items that are not there.
  explicit TaskComparison(const TaskComparisonOptions& options);

  bool empty() const { return rows_.empty(); }
  // InputError on an item that this model cannot take.
  void check(const ModelConfig& config, const Tokenizer& tokenizer) const;
  // Both models, on the CPU. False when cancelled.
  bool run(Context& ctx, const Model& original, const Model& sparse, const Tokenizer& tokenizer,
           const std::atomic<bool>& cancel, ProgressLine& progress);
  // Of a finished run: acc, or acc_norm where a task has it.
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
