// SPDX-License-Identifier: Apache-2.0
// A column of a row group, entry by entry: its levels, and a value where there is one. A page is in
// memory at a time, and the dictionary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twell/parquet/metadata.h"
#include "twell/parquet/rle.h"
#include "twell/parquet/schema.h"

namespace twell {

// Values in PLAIN encoding.
class PlainReader {
 public:
  PlainReader() = default;
  PlainReader(std::span<const std::byte> bytes, const ParquetField& field, const std::string& where)
      : bytes_(bytes), field_(&field), where_(&where) {}
  // Text is checked to be UTF-8. InputError when the bytes end early.
  nlohmann::json next();

 private:
  std::span<const std::byte> take(size_t count);
  template <typename T>
  T number();

  std::span<const std::byte> bytes_;
  const ParquetField* field_ = nullptr;
  const std::string* where_ = nullptr;
  uint32_t bit_ = 0;  // of the first byte, for BOOLEAN
};

class ParquetColumn {
 public:
  // The file's bytes, the chunk and the field must outlive it; messages begin with `where`.
  // InputError on a chunk that lies outside the file, is compressed in a way that is not read, or
  // is of another type than the schema says.
  ParquetColumn(std::span<const std::byte> file, const ParquetChunk& chunk,
                const ParquetField& field, std::string where);
  ParquetColumn(const ParquetColumn&) = delete;
  ParquetColumn& operator=(const ParquetColumn&) = delete;

  // Of the entry here, which at_end() says that there is. InputError on damaged pages.
  bool at_end() const { return left_ == 0; }
  int repetition();
  int definition();
  // Steps over the entry; its value, null where it has none.
  nlohmann::json take();

  size_t file_position() const { return static_cast<size_t>(rest_.data() - file_.data()); }

 private:
  void load_entry();
  void load_page();
  void load_dictionary(const ParquetPageHeader& header, std::span<const std::byte> bytes);
  void begin_page(const ParquetPageHeader& header, std::span<const std::byte> bytes);
  void begin_page_v2(const ParquetPageHeader& header, std::span<const std::byte> stored);
  void begin_entries(const ParquetPageHeader& header);
  void begin_values(int32_t encoding, std::span<const std::byte> bytes);
  std::span<const std::byte> unpack(std::span<const std::byte> stored, size_t bytes);
  [[noreturn]] void fail(std::string_view reason) const;

  std::span<const std::byte> file_, rest_;  // rest_: pages not yet read
  const ParquetChunk& chunk_;
  const ParquetField& field_;
  std::string where_;
  int64_t left_;           // entries, that here included
  int64_t page_left_ = 0;  // of those, in the page, that here not included
  bool loaded_ = false;    // the entry's levels
  int repetition_ = 0, definition_ = 0;
  std::unique_ptr<std::byte[]> page_;  // decompressed
  RleReader repetitions_, definitions_, indices_;
  PlainReader plain_;
  enum class Values { kPlain, kDictionary, kRleBoolean } values_ = Values::kPlain;
  std::vector<nlohmann::json> dictionary_;
};

}  // namespace twell
