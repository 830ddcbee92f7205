// SPDX-License-Identifier: Apache-2.0
// Expands a list of files and folders into files, in a fixed order.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace twell {

struct TextFile {
  std::filesystem::path path;
  int64_t bytes = 0;     // on disk
  int64_t modified = 0;  // time of the last change, in nanoseconds since 1970
};

// Paths keep their order. A folder stands for every regular file below it, each folder's entries
// sorted by name (bytewise), except hidden files and folders (name starting with a dot). Inside a
// folder, links to files are followed and links to folders are not, so that no loop can form;
// pipes, sockets, devices and broken links are skipped. A file reached twice is listed once.
// InputError: a given path is missing or neither file nor folder; the list would be empty.
// A subfolder that cannot be listed is reported to on_fault(reason), which may throw.
std::vector<TextFile> list_text_files(const std::vector<std::filesystem::path>& paths,
                                      const std::function<void(const std::string&)>& on_fault);

}  // namespace twell
