// SPDX-License-Identifier: Apache-2.0
// Streams documents from files and folders: text, .jsonl, .gz/.xz/.zst of either, and .parquet.
//
// A text file is one document, or several separated by NUL bytes. A .jsonl file holds one per line,
// in a string field of an object; a .parquet file holds one per row, in a text column. Documents
// without text are skipped. Text must be UTF-8 and is returned byte for byte, without a leading
// byte order mark. decompress.h and twell/parquet/reader.h say which compressed and .parquet files
// can be read.
//
// A folder stands for every regular file below it, each folder's entries sorted by name (bytewise),
// except hidden files and folders (name starting with a dot). Inside a folder, links to files are
// followed and links to folders are not, so that no loop can form; pipes, sockets and devices are
// left out. An entry that cannot be looked at (a link to nothing or to itself, no permission, a
// path that is too long) is a fault. A file reached twice is listed once.
//
// Memory is bounded for files of any size: documents come in pieces of at most piece_bytes, cut at
// line starts (piece_length in text_documents.h). A .jsonl line or .parquet row has at most 64 MiB.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twell/base/log.h"
#include "twell/data/text_documents.h"

namespace twell {

// What to do with a file or folder that is unreadable, corrupt, binary or not UTF-8, and with a
// .jsonl line or .parquet row that has a fault of its own (text_documents.h): stop with an
// InputError, or report it and continue with the next file or row. Pieces returned before the fault
// stay valid.
enum class BadFile { kError, kSkip };

struct TextSourceOptions {
  std::vector<std::filesystem::path> paths;  // files and folders, folders searched recursively
  std::string json_field = "text";
  BadFile bad_file = BadFile::kError;
  int64_t max_bytes = 0;  // stop after this many bytes of text; 0: no limit
  size_t piece_bytes = size_t{1} << 20;
  LogSink log;  // names the first few faults skipped, then gives their number; first pass only
};

struct TextFile {
  std::filesystem::path path;
  int64_t bytes = 0;     // on disk
  int64_t modified = 0;  // time of the last change, in nanoseconds since 1970
};

// A file, or some row groups of a .parquet file.
struct TextUnit {
  TextFile file;
  ParquetRowGroups row_groups;
  int64_t bytes = 0;  // on disk
};

// What BadFile::kSkip left out.
struct TextSkips {
  int64_t files = 0;  // or parts of files, or folders
  int64_t rows = 0;

  TextSkips& operator+=(const TextSkips& other) {
    files += other.files;
    rows += other.rows;
    return *this;
  }
  bool any() const { return files > 0 || rows > 0; }
  bool operator==(const TextSkips&) const = default;
};

// Reads units in order.
class TextStream {
 public:
  // on_skip(reason) is told of each unit and row skipped by BadFile::kSkip; it may be empty.
  TextStream(std::vector<TextUnit> units, TextSourceOptions options,
             std::function<void(const std::string&)> on_skip);
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;
  // The next piece; false at the end. InputError names the file and the fault.
  bool next(TextPiece& piece);
  int64_t bytes_read() const;  // of the units' bytes on disk, read or skipped so far
  const TextSkips& skipped() const { return skipped_; }

 private:
  bool next_of_units(TextPiece& piece);
  std::function<void(const std::string&)> on_bad_row();

  std::vector<TextUnit> units_;
  TextSourceOptions options_;
  std::function<void(const std::string&)> on_skip_;
  size_t index_ = 0;  // the current unit
  std::unique_ptr<DocumentReader> reader_;
  int64_t finished_bytes_ = 0;  // on disk, units before the current one
  int64_t text_bytes_ = 0;      // returned so far; counted only under a limit
  TextSkips skipped_;
};

// Logs the first few faults, each as a warning, and at the end their number.
class SkipLog {
 public:
  explicit SkipLog(LogSink log) : log_(std::move(log)) {}
  void skipped(const std::string& fault);
  void end();

 private:
  LogSink log_;
  int64_t count_ = 0;
};

// The documents in a fixed order: paths as given, folder contents sorted by name.
class TextSource {
 public:
  explicit TextSource(const TextSourceOptions& options);  // InputError: missing path, no files
  TextSource(const TextSource&) = delete;
  TextSource& operator=(const TextSource&) = delete;
  // The next piece; false at the end. InputError names the file and the fault.
  bool next(TextPiece& piece);
  bool next(std::string& text);  // the same without document starts
  void rewind();
  int64_t total_bytes() const { return total_bytes_; }  // bytes on disk of all files, for progress
  int64_t bytes_read() const { return stream_->bytes_read(); }  // of total_bytes(), so far
  TextSkips skipped() const {
    TextSkips all = unlisted_;
    return all += stream_->skipped();
  }
  // What could not be looked at when the folders were listed.
  const TextSkips& unlisted() const { return unlisted_; }

  const TextSourceOptions& options() const { return options_; }
  const std::vector<TextUnit>& files() const { return files_; }
  // The files in order, cut into parts that can be read independently of each other: consecutive
  // files of at most part_bytes on disk together, or a single larger file, or row groups of a
  // .parquet file larger than that. The cuts depend only on the files. With max_bytes, which needs
  // the text before it to be counted, all files are one part.
  std::vector<std::vector<TextUnit>> parts(int64_t part_bytes) const;
  SkipLog& skip_log() { return skip_log_; }  // for who reads the parts

 private:
  TextSourceOptions options_;
  std::vector<TextUnit> files_;
  int64_t total_bytes_ = 0;
  TextSkips unlisted_;
  SkipLog skip_log_;
  bool read_ = false;  // whether next() was called
  std::unique_ptr<TextStream> stream_;
};

}  // namespace twell
