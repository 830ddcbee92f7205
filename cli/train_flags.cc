// SPDX-License-Identifier: Apache-2.0
#include "cli/train_flags.h"

namespace twell::cli {
namespace {

void add_run_flags(Command& command, TrainFlags& flags) {
  command.group("Run");
  command
      .flag("--resume", &flags.resume,
            "Continue the run in --out where its newest checkpoint left it, bit for bit (same "
            "machine, --device and --threads); its options are remembered")
      .not_in_files();
  Option& resume_from =
      command
          .value(
              "--resume-from", &flags.resume_from, "STEP",
              "Resume from the checkpoint of this step; later ones and their metrics are removed")
          .not_in_files();
  command
      .flag("--fall-back", &flags.fall_back,
            "Resume from the newest intact checkpoint where the newest is damaged")
      .not_in_files()
      .excludes(resume_from);
  command
      .flag("--dry-run", &flags.dry_run,
            "Print parameters, memory, FLOPs and steps, and touch nothing")
      .not_in_files();
  command
      .value("--log-every", &flags.log_interval, "SECONDS",
             "Time between progress lines when stdout is no terminal")
      .range(0, 1e6);
}

void add_rank_flags(Command& command, TrainFlags& flags) {
  command.group("Several processes (docs/distributed.md)");
  Option& gpus =
      command
          .value("--gpus", &flags.gpus, "N",
                 "Train on N GPUs of this machine, with a process for each; torchrun, srun and "
                 "mpirun start processes on several machines")
          .range(1, 1024)
          .hide_default();
  command.value("--ranks", &flags.ranks, "N", "Train with N processes on this machine's CPU")
      .range(1, 1024)
      .hide_default()
      .excludes(gpus);
  command
      .value("--collective-timeout", &flags.collective_timeout, "SECONDS",
             "A process that is silent for this long ends the run")
      .range(1, 86400);
  command
      .value("--max-restarts", &flags.max_restarts, "N",
             "With --gpus or --ranks: resume this many times when a process is lost")
      .range(0, 1e6)
      .not_in_files();
}

void add_table(Command& command, RunSettings& settings) {
  for (const OptionGroup& group : option_table()) {
    for (const OptionRow& row : group.rows) {
      command.add(make_option(row, group.heading, settings));
    }
  }
  command.at("tokens").excludes(command.at("steps"));
}

void add_task_flags(Command& command, TaskComparisonOptions& tasks) {
  command.group("Sparsifying a model with another activation (--from)");
  command.value("--tasks", &tasks.tasks, "NAMES",
                "With --relufy: multiple-choice tasks, with commas between them, that both models "
                "are put to at the end ('twell eval --help' has the names)");
  command.value("--task-data", &tasks.data, "DIR",
                "Folder with the tasks' data sets as JSON lines or Parquet");
  command.value("--task-limit", &tasks.limit, "N", "Only the first items of each; 0: all");
}

}  // namespace

void add_train_flags(Command& command, TrainFlags& flags) {
  add_run_flags(command, flags);
  add_rank_flags(command, flags);
  add_source_options(command, flags.data);
  add_tokenizer_options(command, flags.data);
  command.value("--shards", &flags.shards, "DIR",
                "Folder of shards to use, or to write --data to (default: OUT/shards); from 'twell "
                "tokenize'");
  add_table(command, flags.settings);
  add_task_flags(command, flags.tasks);
}

}  // namespace twell::cli
