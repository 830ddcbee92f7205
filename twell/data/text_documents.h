// SPDX-License-Identifier: Apache-2.0
// Reads the documents of one file in pieces of bounded size.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "twell/data/decompress.h"
#include "twell/parquet/reader.h"

namespace twell {

// A document, or a part of one that exceeds the piece size.
struct TextPiece {
  std::string text;  // never empty; UTF-8
  bool begins_document = false;
  int64_t line = 0;  // of a .jsonl file, from 1
};

struct DocumentOptions {
  std::string json_field = "text";  // empty: a line of JSON is a document as it is
  size_t piece_bytes = size_t{1} << 20;
  size_t chunk_bytes = size_t{256} << 10;   // bytes per read
  size_t max_json_line = size_t{64} << 20;  // a longer line is a fault
  ParquetRowGroups row_groups;              // of a .parquet file: those to read
  // Told of each .jsonl line and .parquet row that has a fault of its own and is left out. Empty:
  // such a row is a fault of the file.
  std::function<void(const std::string& fault)> on_bad_row = {};
};

// Reads `path` (.parquet, .jsonl, else text; the latter two may be compressed) from start to
// end. Every fault is an InputError naming the file, the reason, and the byte, line or row. A row
// has a fault of its own when it is not UTF-8, not a JSON object, too long, or without a string in
// the field.
class DocumentReader {
 public:
  static std::unique_ptr<DocumentReader> open(const std::filesystem::path& path,
                                              const DocumentOptions& options);
  virtual ~DocumentReader() = default;
  virtual bool next(TextPiece& piece) = 0;      // false at the end
  virtual int64_t file_bytes_read() const = 0;  // of the file, or of its row groups to read
};

// Length of the first piece of at most `limit` bytes (at least 4). A text within the limit is one
// piece. Otherwise the piece ends after the last newline in the second half of the limit that has
// characters other than white space on both sides: every pre-tokenizer starts a word there, so the
// pieces give the same tokens as the whole document. Without one it ends after a newline followed
// by a character other than white space (same tokens with most pre-tokenizers), else after any
// newline, else between two characters.
size_t piece_length(std::string_view text, size_t limit);

// Why a file that starts with these bytes is not UTF-8 text; empty when it may be.
std::string_view binary_reason(std::string_view start);

}  // namespace twell
