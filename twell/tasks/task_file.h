// SPDX-License-Identifier: Apache-2.0
// The items of a task, from a local copy of its data set: JSON lines, also compressed (.gz, .xz,
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
  std::string hash;  // of the items read, to tell another file of the same name
  std::vector<TaskItem> items;
};

// Reads the first `limit` items (0: all) of the first file there is below the folder: NAME.jsonl
// and NAME.parquet, the task's split in task.folders (SPLIT.jsonl, SPLIT-00000-of-00001.parquet,
// SPLIT/0000.parquet), task.files. Blank lines are passed over. JSON lines without "label" may have
// the labels beside them, one a line, in NAME-labels.lst.
// InputError: no file, a file that cannot be read, and, naming file and line or row, an item that
// is not a JSON object, lacks a field, or is impossible.
TaskData load_task(const Task& task, const std::filesystem::path& folder, int64_t limit = 0);

}  // namespace twell
