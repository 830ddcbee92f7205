// SPDX-License-Identifier: Apache-2.0
// Documents out of files and folders: text, .jsonl, .gz/.xz/.zst of either, and .parquet; streamed.
//
// A text file is one document, or several separated by NUL bytes; a .jsonl file holds one per line,
// in a string field of an object, a .parquet file one per row, in a column of text. Documents
// without text are passed over. Text must be UTF-8 and is handed out byte for byte, without a
// leading byte order mark. Which files a folder stands for, and their order: text_files.h. What
// compressed files may hold: decompress.h; .parquet files: twell/parquet/reader.h.
//
// Memory is bounded whatever the size of a file: documents come in pieces of at most piece_bytes,
// cut where a line starts (piece_length in text_documents.h). A .jsonl line and a .parquet row is
// at most 64 MiB long.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "twell/base/log.h"
#include "twell/data/text_documents.h"

namespace twell {

// What to do with a file that is unreadable, corrupt, binary or not UTF-8, or a .jsonl or .parquet
// file with a line or row that is not JSON or lacks the field: stop with an InputError, or report
// it and go on with the next file. What was handed out before the fault stands.
enum class BadFile { kError, kSkip };

struct TextSourceOptions {
  std::vector<std::filesystem::path> paths;  // files and folders, folders searched recursively
  std::string json_field = "text";
  BadFile bad_file = BadFile::kError;
  int64_t max_bytes = 0;  // stop after this many bytes of text; 0: no limit
  size_t piece_bytes = size_t{1} << 20;
  LogSink log;  // the first few skipped files by name, then their number, in the first pass only
};

// The documents, in a fixed order: paths as given, folder contents sorted by name.
class TextSource {
 public:
  explicit TextSource(const TextSourceOptions& options);  // InputError: missing path, no files
  ~TextSource();
  // The next piece; false at the end. InputError names the file and the fault.
  bool next(TextPiece& piece);
  bool next(std::string& text);  // for those who do not care where documents begin
  void rewind();
  int64_t total_bytes() const;    // bytes on disk of all files, for progress
  int64_t bytes_read() const;     // of those, read or passed over so far
  int64_t files_skipped() const;  // bad files passed over so far, unreadable subfolders included

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
