// SPDX-License-Identifier: Apache-2.0
// The part of twell eval that runs multiple-choice tasks.
#pragma once

#include <filesystem>
#include <string>

#include "cli/options.h"
#include "twell/tasks/task_run.h"

namespace twell::cli {

struct EvalTasksArguments {
  std::string tasks;  // comma-separated names; empty: evaluate on a text instead
  std::filesystem::path data;
  int64_t limit = 0;
  TaskRunOptions run;
  std::string ffn = "auto";
  bool json = false;
};
// Adds --tasks and its related options. The command's other options must be declared already.
void add_eval_tasks_options(Command& command, CommonOptions& common, EvalTasksArguments& arguments);

int run_eval_tasks(const CommonOptions& common, const EvalTasksArguments& arguments);

}  // namespace twell::cli
