// SPDX-License-Identifier: Apache-2.0
// Loads a task's items from a local copy of its data set: JSON lines, also compressed (.gz, .xz,
// .zst), or Parquet.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "twell/tasks/task.h"

namespace twell {

struct TaskData {
  std::filesystem::path file;
  std::string hash;  // of the items read; distinguishes files of the same name
  std::vector<TaskItem> items;
};

// Reads the first `limit` items (0: all) of the first of these files that exists below the folder:
// NAME.jsonl, NAME.parquet, the task's split in task.folders (SPLIT.jsonl,
// SPLIT-00000-of-00001.parquet, SPLIT/0000.parquet), task.files. Blank lines are skipped. Labels
// that the JSON lines lack may stand in NAME-labels.lst beside them, one per line.
// InputError: no file, an unreadable file, or, naming file and line or row, an item that is not a
// JSON object, lacks a field, or is invalid.
TaskData load_task(const Task& task, const std::filesystem::path& folder, int64_t limit = 0);

}  // namespace twell
