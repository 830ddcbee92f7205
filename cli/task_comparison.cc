// SPDX-License-Identifier: Apache-2.0
#include "cli/task_comparison.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/tasks/choice_tokens.h"
#include "twell/tasks/task_run.h"

namespace twell::cli {
namespace {

const Accuracy& headline(const TaskAccuracy& accuracy) {
  return accuracy.acc_norm ? *accuracy.acc_norm : accuracy.acc;
}

nlohmann::json accuracy_json(const TaskAccuracy& accuracy) {
  nlohmann::json json = {{"acc", accuracy.acc.mean}};
  if (accuracy.acc_norm) json["acc_norm"] = accuracy.acc_norm->mean;
  return json;
}

}  // namespace

TaskComparison::TaskComparison(const TaskComparisonOptions& options) {
  if (options.tasks.empty()) return;
  TWELL_REQUIRE(!options.data.empty(), "--tasks needs --task-data DIR, the data sets' folder");
  for (const Task* task : parse_task_list(options.tasks)) {
    rows_.push_back({task, load_task(*task, options.data, options.limit), {}, {}});
  }
}

void TaskComparison::check(const ModelConfig& config, const Tokenizer& tokenizer) const {
  const ChoiceEncoder encoder(tokenizer, config, TaskRunOptions{}.begin_token);
  for (const Row& row : rows_) {
    for (const TaskItem& item : row.data.items) {
      encoder.encode(item, fmt::format("{} line {}", row.data.file.string(), item.line));
    }
  }
}

bool TaskComparison::run(Scorer& original, Scorer& sparse, const Tokenizer& tokenizer,
                         const std::atomic<bool>& cancel, ProgressLine& progress) {
  const auto run_model = [&](Scorer& scorer, const char* name, TaskAccuracy Row::*result) {
    TaskRunOptions options;
    options.cancel = &cancel;
    options.on_progress = [&](const TaskProgress& now) {
      progress.update(
          fmt::format("{}: {}  {}/{} items", name, now.task->name, now.items_done, now.items),
          now.items_done == now.items);
    };
    TaskRunner runner(scorer, tokenizer, options);
    for (Row& row : rows_) {
      const std::optional<TaskAccuracy> accuracy = runner.run(*row.task, row.data);
      if (!accuracy) return false;
      row.*result = *accuracy;
    }
    return true;
  };
  const bool finished =
      run_model(original, "original", &Row::original) && run_model(sparse, "sparse", &Row::sparse);
  progress.finish();
  return finished;
}

void TaskComparison::print() const {
  for (const Row& row : rows_) {
    const Accuracy &a = headline(row.original), &b = headline(row.sparse);
    const std::string error =
        b.standard_error ? fmt::format("  ± {:.2f}", 100.0 * *b.standard_error) : "";
    fmt::print("{:<16} {:>12.2f} {:>12.2f}  % {} of {}{}\n", row.task->name, 100.0 * a.mean,
               100.0 * b.mean, row.sparse.acc_norm ? "acc_norm" : "acc", row.sparse.items, error);
  }
}

nlohmann::json TaskComparison::json() const {
  nlohmann::json tasks = nlohmann::json::object();
  for (const Row& row : rows_) {
    tasks[std::string(row.task->name)] = {{"items", row.sparse.items},
                                          {"original", accuracy_json(row.original)},
                                          {"sparse", accuracy_json(row.sparse)}};
  }
  return tasks;
}

}  // namespace twell::cli
