// SPDX-License-Identifier: Apache-2.0
// Streams documents from files and folders: text, .jsonl, .gz/.xz/.zst of either, and .parquet.
//
// A text file is one document, or several separated by NUL bytes. A .jsonl file holds one per line,
// in a string field of an object; a .parquet file holds one per row, in a text column. Documents
// without text are skipped. Text must be UTF-8 and is returned byte for byte, without a leading
// byte order mark. text_files.h says which files a folder stands for and their order; decompress.h
// and twell/parquet/reader.h say which compressed and .parquet files can be read.
//
// Memory is bounded for files of any size: documents come in pieces of at most piece_bytes, cut at
// line starts (piece_length in text_documents.h). A .jsonl line or .parquet row has at most 64 MiB.
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
// it and continue with the next file. Pieces returned before the fault stay valid.
enum class BadFile { kError, kSkip };

struct TextSourceOptions {
  std::vector<std::filesystem::path> paths;  // files and folders, folders searched recursively
  std::string json_field = "text";
  BadFile bad_file = BadFile::kError;
  int64_t max_bytes = 0;  // stop after this many bytes of text; 0: no limit
  size_t piece_bytes = size_t{1} << 20;
  LogSink log;  // names the first few skipped files, then gives their number; first pass only
};

// The documents in a fixed order: paths as given, folder contents sorted by name.
class TextSource {
 public:
  explicit TextSource(const TextSourceOptions& options);  // InputError: missing path, no files
  ~TextSource();
  // The next piece; false at the end. InputError names the file and the fault.
  bool next(TextPiece& piece);
  bool next(std::string& text);  // the same without document starts
  void rewind();
  int64_t total_bytes() const;    // bytes on disk of all files, for progress
  int64_t bytes_read() const;     // of total_bytes(), read or skipped so far
  int64_t files_skipped() const;  // bad files and unreadable subfolders so far

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twell
