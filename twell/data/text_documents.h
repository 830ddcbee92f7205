// SPDX-License-Identifier: Apache-2.0
// The documents of one file, in pieces of bounded size.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "twell/data/decompress.h"

namespace twell {

// A document, or a part of one that is longer than a piece may be.
struct TextPiece {
  std::string text;  // never empty; UTF-8
  bool begins_document = false;
};

struct DocumentOptions {
  std::string json_field = "text";
  size_t piece_bytes = size_t{1} << 20;
  size_t chunk_bytes = size_t{256} << 10;   // read at a time
  size_t max_json_line = size_t{64} << 20;  // a longer one is a fault
};

// Reads `path` (.parquet, .jsonl, else text; the latter two may be compressed) from its start to
// its end. Every fault is an InputError naming the file, the reason, and the byte or the line.
class DocumentReader {
 public:
  static std::unique_ptr<DocumentReader> open(const std::filesystem::path& path,
                                              const DocumentOptions& options);
  virtual ~DocumentReader() = default;
  virtual bool next(TextPiece& piece) = 0;  // false at the end
  virtual int64_t file_bytes_read() const = 0;
};

// Where to end a piece of at most `limit` bytes (at least 4): all of the text when it is short
// enough, else after the last newline in its second half that stands between two characters other
// than white space. Every pre-tokenizer starts a word there, so that the pieces give the same
// tokens as the whole document. Where there is none: after a newline followed by a character other
// than white space (the same tokens with most pre-tokenizers), any newline, or between two
// characters.
size_t piece_length(std::string_view text, size_t limit);

// Why the first bytes of a file say that it is no UTF-8 text; empty when they do not.
std::string_view binary_reason(std::string_view start);

}  // namespace twell
