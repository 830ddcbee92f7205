// SPDX-License-Identifier: Apache-2.0
// The items of a task, from a local copy of its data set: JSON lines, also compressed (.gz, .xz,
// .zst). Parquet is not read; where only that is found, the error says how to convert it.
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

// Looks for task.files below the folder, in their order, and reads the first `limit` items (0: all)
// of the first there is. Blank lines are passed over. A file without "label" may have the labels
// beside it, one a line, in NAME-labels.lst.
// InputError: no file, a file that cannot be read, and, naming file and line, an item that is not
// a JSON object, lacks a field, or is impossible.
TaskData load_task(const Task& task, const std::filesystem::path& folder, int64_t limit = 0);

}  // namespace twell
