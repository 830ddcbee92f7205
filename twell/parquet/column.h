// SPDX-License-Identifier: Apache-2.0
// Reads a column of a row group entry by entry: its levels, and its value if it has one. Only the
// current page and the dictionary page are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "twell/parquet/metadata.h"
#include "twell/parquet/rle.h"
#include "twell/parquet/schema.h"

namespace twell {

// monostate: null. A text points into its page and is valid until the next entry is read.
using ParquetValue =
    std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string_view>;

// Bounds the decompressed bytes that a file's open columns hold, because a few kilobytes can
// decompress to any size.
class ParquetMemory {
 public:
  // InputError beyond 1 GiB, before anything is allocated.
  void take(size_t bytes, const std::string& where);
  void give_back(size_t bytes) { held_ -= bytes; }

 private:
  size_t held_ = 0;
};

// Reads values in PLAIN encoding.
class PlainReader {
 public:
  PlainReader() = default;
  PlainReader(std::span<const std::byte> bytes, const ParquetField& field, const std::string& where)
      : bytes_(bytes), field_(&field), where_(&where) {}
  // InputError when the bytes end early or a text is not UTF-8.
  ParquetValue next();

 private:
  std::span<const std::byte> take(size_t count);
  template <typename T>
  T number();

  std::span<const std::byte> bytes_;
  const ParquetField* field_ = nullptr;
  const std::string* where_ = nullptr;
  uint32_t bit_ = 0;  // for BOOLEAN: next bit of the first byte
};

class ParquetColumn {
 public:
  // The file's bytes, the chunk, the field and the memory must outlive it; messages begin with
  // `where`. InputError when the chunk lies outside the file, has an unsupported compression, or
  // has another type than the schema says.
  ParquetColumn(std::span<const std::byte> file, const ParquetChunk& chunk,
                const ParquetField& field, ParquetMemory& memory, std::string where);
  ~ParquetColumn();
  ParquetColumn(const ParquetColumn&) = delete;
  ParquetColumn& operator=(const ParquetColumn&) = delete;

  // The current entry's levels, valid unless at_end(). InputError on damaged pages.
  bool at_end() const { return left_ == 0; }
  int repetition();
  int definition();
  // Consumes the entry and returns its value, null if it has none.
  ParquetValue take();

 private:
  void load_entry();
  void load_page();
  void load_dictionary(const ParquetPageHeader& header, std::span<const std::byte> stored);
  void begin_page(const ParquetPageHeader& header, std::span<const std::byte> bytes);
  void begin_page_v2(const ParquetPageHeader& header, std::span<const std::byte> stored);
  void begin_entries(const ParquetPageHeader& header);
  void begin_values(int32_t encoding, std::span<const std::byte> bytes);
  std::span<const std::byte> unpack(std::span<const std::byte> stored, size_t bytes);
  void give_back_page();
  [[noreturn]] void fail(std::string_view reason) const;

  std::span<const std::byte> rest_;  // pages not yet read
  const ParquetChunk& chunk_;
  const ParquetField& field_;
  ParquetMemory& memory_;
  std::string where_;
  int64_t left_;           // entries, including the current one
  int64_t page_left_ = 0;  // entries in the page after the current one
  bool loaded_ = false;    // whether the entry's levels are read
  int repetition_ = 0, definition_ = 0;
  std::unique_ptr<std::byte[]> page_;  // decompressed
  size_t page_bytes_ = 0;
  RleReader repetitions_, definitions_, indices_;
  PlainReader plain_;
  enum class Values { kPlain, kDictionary, kRleBoolean } values_ = Values::kPlain;
  std::unique_ptr<std::byte[]> dictionary_page_;  // decompressed; texts of dictionary_ point to it
  size_t dictionary_bytes_ = 0;                   // of both
  std::vector<ParquetValue> dictionary_;
};

}  // namespace twell
