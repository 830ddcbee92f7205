// SPDX-License-Identifier: Apache-2.0
// The options of `twell train`: those of a run (twell/train/option_table.h), and those that only
// the command line has, of data, resuming, and processes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/prepare_data.h"
#include "cli/task_comparison.h"
#include "twell/train/option_table.h"

namespace twell::cli {

struct TrainFlags {
  RunSettings settings;
  DataOptions data;
  std::filesystem::path shards;
  TaskComparisonOptions tasks;  // evaluated after sparsifying
  bool resume = false;
  std::optional<int64_t> resume_from;  // step of the checkpoint to resume from
  bool fall_back = false;
  bool dry_run = false;
  double log_interval = 10.0;         // seconds
  int64_t gpus = 0, ranks = 0;        // ranks to start on this machine; 0: none
  double collective_timeout = 120.0;  // seconds
  int64_t max_restarts = 0;
};

void add_train_flags(Command& command, TrainFlags& flags);

}  // namespace twell::cli
