// SPDX-License-Identifier: Apache-2.0
// Documents out of files and folders: text, .jsonl, and .gz/.xz/.zst of either; streamed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "twell/base/log.h"

namespace twell {

enum class BadFile { kError, kSkip };  // unreadable, binary or not UTF-8

struct TextSourceOptions {
  std::vector<std::filesystem::path> paths;  // files and folders, folders searched recursively
  std::string json_field = "text";
  BadFile bad_file = BadFile::kError;
  int64_t max_bytes = 0;  // stop after this many bytes of text; 0: no limit
  LogSink log;
};

// The documents, in a fixed order (paths as given, folder contents sorted by name). A text file is
// one document, or several separated by NUL bytes; a .jsonl file one per line.
class TextSource {
 public:
  explicit TextSource(const TextSourceOptions& options);  // InputError: missing path, no files
  ~TextSource();
  bool next(std::string& document);  // false at the end; InputError names the file and the fault
  void rewind();
  int64_t total_bytes() const;    // bytes on disk of all files, for progress
  int64_t bytes_read() const;     // of those, read so far
  int64_t files_skipped() const;  // bad files passed over

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
