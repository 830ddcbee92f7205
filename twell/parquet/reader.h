// SPDX-License-Identifier: Apache-2.0
// Streams the rows of a Parquet file as JSON objects, with one page of each column in memory.
//
// Supported are columns of text (BYTE_ARRAY as UTF8), INT32, INT64, FLOAT, DOUBLE and BOOLEAN, in
// lists and structs of any nesting, with nulls; data pages of versions 1 and 2; the encodings PLAIN
// and dictionary (and RLE of BOOLEAN); uncompressed, SNAPPY, GZIP and ZSTD. Anything else, and a
// damaged file, gives an InputError that names the file, the row group (from 1), the column and the
// reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "twell/base/file.h"
#include "twell/parquet/column.h"
#include "twell/parquet/metadata.h"
#include "twell/parquet/schema.h"

namespace twell {

// The row groups [first, end) of a file; the default is all of them.
struct ParquetRowGroups {
  size_t first = 0, end = SIZE_MAX;
  bool operator==(const ParquetRowGroups&) const = default;
};

class ParquetReader {
 public:
  // Maps the file. Reads the named top-level fields, or all when no names are given.
  explicit ParquetReader(const std::filesystem::path& path,
                         const std::vector<std::string>& names = {}, ParquetRowGroups groups = {});
  // Reads a file's bytes, which must outlive the reader.
  ParquetReader(std::span<const std::byte> bytes, std::string source,
                const std::vector<std::string>& names = {});
  ParquetReader(const ParquetReader&) = delete;
  ParquetReader& operator=(const ParquetReader&) = delete;

  // Stores the next row of the row groups in `row` as an object; false at the end. Lists become
  // arrays, nulls null.
  // A row takes at most 64 MiB.
  bool next(nlohmann::json& row);

  const std::string& source() const { return source_; }  // for messages
  int64_t rows() const { return metadata_.rows; }        // in the file
  int64_t row() const { return row_; }  // number in the file of the last row read, from 1
  // Stored bytes of each row group of the file, all columns together.
  std::vector<int64_t> row_group_bytes() const;
  int64_t file_bytes_read() const;  // of the row groups to read; approximate, for progress

 private:
  void open(const std::vector<std::string>& names);
  void check_row_groups() const;
  void choose_fields(const std::vector<std::string>& names);
  void choose_row_groups();
  bool begin_row_group();
  bool require_no_values(const ParquetRowGroup& group) const;
  nlohmann::json read(const ParquetField& field, int repetition);
  nlohmann::json read_list(const ParquetField& field, int repetition);
  nlohmann::json read_absent(const ParquetField& field, int repetition);
  nlohmann::json read_value(const ParquetField& field, int repetition);
  ParquetValue take(const ParquetField& field, int repetition, int definition);
  ParquetColumn& column(const ParquetField& field);
  ParquetColumn& first_column(const ParquetField& field);
  void spend(size_t bytes);
  [[noreturn]] void fail(const std::string& reason) const;

  MappedFile mapped_;
  std::span<const std::byte> file_;
  std::string source_;
  ParquetMetadata metadata_;
  std::vector<ParquetField> fields_;  // fields to read
  ParquetRowGroups groups_;           // row groups to read
  int64_t groups_bytes_ = 0;          // their stored bytes; the file's size when they are all
  int64_t rows_before_ = 0;           // in the row groups before them
  int64_t rows_to_read_ = 0;          // in them
  size_t next_row_group_ = 0;         // to be opened
  bool in_row_group_ = false;         // between the opening of a row group and its end
  int64_t rows_left_ = 0;             // in the current row group
  ParquetMemory memory_;
  std::deque<ParquetColumn> open_;         // columns of the row group, in the fields' order
  std::vector<ParquetColumn*> by_column_;  // by column number; null: not read
  int64_t row_ = 0;                        // last row read, from 1
  size_t row_bytes_ = 0;
};

}  // namespace twell
