// SPDX-License-Identifier: Apache-2.0
#include "cli/eval_tasks.h"

#include <fmt/core.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/device.h"
#include "cli/loading.h"
#include "cli/process.h"
#include "cli/progress_line.h"
#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/checkpoint/checkpoint.h"
#include "twell/train/metrics.h"

namespace twell::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

struct Result {
  const Task* task;
  TaskData data;
  TaskAccuracy accuracy;
};

// The summary of a table of several tasks: the mean, with acc for tasks without acc_norm.
double mean_accuracy(const std::vector<Result>& results, bool norm) {
  double sum = 0.0;
  for (const Result& result : results) {
    const TaskAccuracy& accuracy = result.accuracy;
    sum += norm ? accuracy.acc_norm.value_or(accuracy.acc).mean : accuracy.acc.mean;
  }
  return sum / static_cast<double>(results.size());
}

void show_progress(ProgressLine& line, const TaskProgress& progress, Clock::time_point start) {
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const auto done = static_cast<double>(progress.tokens_done - progress.tokens_found);
  const auto left = static_cast<double>(progress.tokens - progress.tokens_done);
  line.update(fmt::format("{}  {}/{} items  {} tok/s  ETA {}", progress.task->name,
                          progress.items_done, progress.items, format_count(done / seconds),
                          format_duration(left * seconds / done)),
              progress.items_done == progress.items);
}

void add_accuracy(ordered_json& json, const char* name, const Accuracy& accuracy) {
  json[name] = accuracy.mean;
  json[std::string(name) + "_stderr"] =
      accuracy.standard_error ? ordered_json(*accuracy.standard_error) : ordered_json();
}

ordered_json to_json(const CommonOptions& common, const EvalTasksArguments& arguments,
                     const std::string& device, const std::vector<Result>& results) {
  ordered_json tasks;
  for (const Result& result : results) {
    ordered_json& task = tasks[std::string(result.task->name)];
    task["file"] = result.data.file.string();
    task["items"] = result.accuracy.items;
    add_accuracy(task, "acc", result.accuracy.acc);
    if (result.accuracy.acc_norm) add_accuracy(task, "acc_norm", *result.accuracy.acc_norm);
  }
  return {{"checkpoint", common.checkpoint.string()},
          {"device", device},
          {"bos", arguments.run.begin_token},
          {"ffn", arguments.ffn},
          {"limit", arguments.limit},
          {"tasks", tasks},
          {"mean_acc", mean_accuracy(results, false)},
          {"mean_acc_norm", mean_accuracy(results, true)}};
}

std::string percent(const std::optional<Accuracy>& accuracy) {
  if (!accuracy) return "-";
  const std::string mean = fmt::format("{:.2f}", 100.0 * accuracy->mean);
  return accuracy->standard_error
             ? fmt::format("{} ± {:.2f}", mean, 100.0 * *accuracy->standard_error)
             : mean;
}

void print_table(const std::vector<Result>& results) {
  fmt::print("{:<16} {:>7} {:>15} {:>15}\n", "task", "items", "acc %", "acc_norm %");
  for (const Result& result : results) {
    fmt::print("{:<16} {:>7} {:>15} {:>15}\n", result.task->name, result.accuracy.items,
               percent(result.accuracy.acc), percent(result.accuracy.acc_norm));
  }
  if (results.size() > 1) {
    fmt::print("{:<16} {:>7} {:>15.2f} {:>15.2f}\n", "mean", "",
               100.0 * mean_accuracy(results, false), 100.0 * mean_accuracy(results, true));
  }
}

}  // namespace

void add_eval_tasks_options(Command& command, CommonOptions& common,
                            EvalTasksArguments& arguments) {
  command.group("Tasks");
  std::string names;
  for (const Task& task : all_tasks()) names += fmt::format(" {}", task.name);
  Option& tasks =
      command.value("--tasks", &arguments.tasks, "NAMES",
                    "Multiple-choice tasks instead of a text, with commas between them:" + names);
  for (const char* of_a_text :
       {"data", "shards", "max-tokens", "sequence-length", "stride", "json-field"}) {
    tasks.excludes(command.at(of_a_text));
  }
  command
      .value("--task-data", &arguments.data, "DIR",
             "Folder with the tasks' data sets as JSON lines or Parquet")
      .needs(tasks);
  add_out_option(
      command, common,
      "Folder for results.json and every item's scores; an evaluation that was stopped continues")
      .needs(tasks);
  command.value("--limit", &arguments.limit, "N", "Only the first items of each task; 0: all")
      .at_least(0)
      .needs(tasks);
  command
      .value("--batch-tokens", &arguments.run.batch_tokens, "N",
             "Tokens that go through the model together: bounds memory; 0: what suits the device")
      .needs(tasks);
}

int run_eval_tasks(const CommonOptions& common, const EvalTasksArguments& arguments) {
  TWELL_REQUIRE(!arguments.data.empty(), "--tasks needs --task-data DIR, the data sets' folder");
  // Validate all input before computing anything.
  std::vector<Result> results;
  for (const Task* task : parse_task_list(arguments.tasks)) {
    results.push_back({task, load_task(*task, arguments.data, arguments.limit), {}});
  }
  const FfnPolicy policy = parse_ffn_policy(arguments.ffn);
  const ModelConfig config = load_config(common.checkpoint);
  const Tokenizer tokenizer = load_tokenizer(common.checkpoint, config);
  ScorerPlan plan = TaskRunner::plan(config, arguments.run);
  plan.ffn = policy;
  const std::unique_ptr<Engine> engine = load_engine(common, {.scorer = plan});
  const std::unique_ptr<Scorer> scorer = engine->scorer(policy);

  ProgressLine progress(30.0, stderr);
  Clock::time_point start;
  TaskRunOptions options = arguments.run;
  options.out = common.out;
  options.cancel = &stop_on_signals();
  options.on_progress = [&](const TaskProgress& now) { show_progress(progress, now, start); };
  TaskRunner runner(*scorer, tokenizer, options);
  for (Result& result : results) {
    start = Clock::now();
    const std::optional<TaskAccuracy> accuracy = runner.run(*result.task, result.data);
    if (!accuracy) {
      progress.print(common.out.empty()
                         ? "interrupted; with --out DIR the scores would have been kept"
                         : "interrupted; the same command continues");
      return interrupted_exit_code();
    }
    result.accuracy = *accuracy;
  }
  progress.finish();

  const std::string json = to_json(common, arguments, engine->device(), results)
                               .dump(2, ' ', false, ordered_json::error_handler_t::replace);
  if (!common.out.empty()) write_file_atomic(common.out / "results.json", json + "\n");
  if (arguments.json) {
    fmt::print("{}\n", json);
  } else {
    print_table(results);
  }
  return kExitOk;
}

}  // namespace twell::cli
