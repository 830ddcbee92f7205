// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/column.h"

#include <zlib.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/utf8.h"
#include "twell/parquet/codec.h"

namespace twell {
namespace {

constexpr int32_t kMaxPageBytes = 512 << 20;

std::string encoding_name(int32_t encoding) {
  static constexpr std::array<const char*, 10> kNames = {"PLAIN",
                                                         "1",
                                                         "PLAIN_DICTIONARY",
                                                         "RLE",
                                                         "BIT_PACKED",
                                                         "DELTA_BINARY_PACKED",
                                                         "DELTA_LENGTH_BYTE_ARRAY",
                                                         "DELTA_BYTE_ARRAY",
                                                         "RLE_DICTIONARY",
                                                         "BYTE_STREAM_SPLIT"};
  const auto index = static_cast<size_t>(encoding);
  return index < kNames.size() ? kNames[index] : std::to_string(encoding);
}

int bits_of(int max_level) { return std::bit_width(static_cast<unsigned>(max_level)); }

// Levels of version 1: their size, then a run.
std::span<const std::byte> sized_part(std::span<const std::byte>& bytes, const std::string& where) {
  uint32_t size = 0;
  const bool there = bytes.size() >= sizeof(size);
  if (there) std::memcpy(&size, bytes.data(), sizeof(size));
  TWELL_REQUIRE(there && size <= bytes.size() - sizeof(size),
                "{}: a damaged page (levels end early)", where);
  const auto part = bytes.subspan(sizeof(size), size);
  bytes = bytes.subspan(sizeof(size) + size);
  return part;
}

}  // namespace

std::span<const std::byte> PlainReader::take(size_t count) {
  TWELL_REQUIRE(count <= bytes_.size(), "{}: a damaged page (values end early)", *where_);
  const auto taken = bytes_.first(count);
  bytes_ = bytes_.subspan(count);
  return taken;
}

template <typename T>
T PlainReader::number() {
  T value;
  std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
  return value;
}

nlohmann::json PlainReader::next() {
  switch (field_->type) {
    case kParquetBoolean: {
      TWELL_REQUIRE(!bytes_.empty(), "{}: a damaged page (values end early)", *where_);
      const bool value = ((static_cast<uint32_t>(bytes_[0]) >> bit_) & 1) != 0;
      bit_ = (bit_ + 1) % 8;
      if (bit_ == 0) take(1);
      return value;
    }
    case kParquetInt32:
      return field_->is_unsigned ? nlohmann::json(number<uint32_t>())
                                 : nlohmann::json(number<int32_t>());
    case kParquetInt64:
      return field_->is_unsigned ? nlohmann::json(number<uint64_t>())
                                 : nlohmann::json(number<int64_t>());
    case kParquetFloat:
      return number<float>();
    case kParquetDouble:
      return number<double>();
    case kParquetByteArray: {
      const auto bytes = take(number<uint32_t>());
      const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      TWELL_REQUIRE(find_invalid_utf8(text) == text.size(), "{}: a text that is not UTF-8",
                    *where_);
      return text;
    }
    default:
      throw Error(fmt::format("{}: type {} was not refused", *where_, field_->type));
  }
}

ParquetColumn::ParquetColumn(std::span<const std::byte> file, const ParquetChunk& chunk,
                             const ParquetField& field, std::string where)
    : file_(file), chunk_(chunk), field_(field), where_(std::move(where)), left_(chunk.values) {
  TWELL_REQUIRE(!chunk.elsewhere, "{}: in another file, or encrypted", where_);
  TWELL_REQUIRE(chunk.type == field.type, "{}: of type {}, where the schema says {}", where_,
                chunk.type, field.type);
  const std::string refusal = parquet_codec_refusal(chunk.codec);
  TWELL_REQUIRE(refusal.empty(), "{}: {} is not read (SNAPPY, GZIP, ZSTD and none are)", where_,
                refusal);
  constexpr int64_t kMagicBytes = 4;
  const bool has_dictionary =
      chunk.dictionary_page_offset > 0 && chunk.dictionary_page_offset < chunk.data_page_offset;
  const int64_t begin = has_dictionary ? chunk.dictionary_page_offset : chunk.data_page_offset;
  TWELL_REQUIRE(chunk.values >= 0 && chunk.compressed_bytes >= 0 && begin >= kMagicBytes &&
                    begin <= std::ssize(file) && chunk.compressed_bytes <= std::ssize(file) - begin,
                "{}: {} values in {} bytes from {} of a file of {}", where_, chunk.values,
                chunk.compressed_bytes, begin, file.size());
  rest_ = file.subspan(static_cast<size_t>(begin), static_cast<size_t>(chunk.compressed_bytes));
}

void ParquetColumn::fail(std::string_view reason) const {
  throw InputError(fmt::format("{}: a damaged page ({})", where_, reason));
}

int ParquetColumn::repetition() {
  load_entry();
  return repetition_;
}

int ParquetColumn::definition() {
  load_entry();
  return definition_;
}

void ParquetColumn::load_entry() {
  if (loaded_) return;
  TWELL_CHECK(left_ > 0, "{}: read past its end", where_);
  while (page_left_ == 0) load_page();
  --page_left_;
  loaded_ = true;
  repetition_ = field_.max_repetition > 0 ? static_cast<int>(repetitions_.next()) : 0;
  definition_ = field_.definition > 0 ? static_cast<int>(definitions_.next()) : 0;
  if (repetition_ > field_.max_repetition || definition_ > field_.definition) {
    fail("an impossible level");
  }
}

nlohmann::json ParquetColumn::take() {
  load_entry();
  loaded_ = false;
  --left_;
  if (definition_ < field_.definition) return nullptr;
  switch (values_) {
    case Values::kPlain:
      return plain_.next();
    case Values::kRleBoolean:
      return indices_.next() != 0;
    default:
      break;
  }
  const uint32_t index = indices_.next();
  if (index >= dictionary_.size()) fail("an index beyond the dictionary");
  return dictionary_[index];
}

void ParquetColumn::load_page() {
  if (rest_.empty()) fail(fmt::format("{} values are missing", left_));
  size_t header_bytes = 0;
  const ParquetPageHeader header = parse_page_header(rest_, where_, header_bytes);
  rest_ = rest_.subspan(header_bytes);
  if (header.compressed_bytes < 0 || header.compressed_bytes > std::ssize(rest_)) {
    fail(fmt::format("{} bytes where {} are left", header.compressed_bytes, rest_.size()));
  }
  if (header.bytes < 0 || header.bytes > kMaxPageBytes) {
    fail(fmt::format("{} bytes decompressed; at most {} are read", header.bytes, kMaxPageBytes));
  }
  const auto stored = rest_.first(static_cast<size_t>(header.compressed_bytes));
  rest_ = rest_.subspan(stored.size());
  if (header.checksum) {
    const auto* bytes = reinterpret_cast<const Bytef*>(stored.data());
    if (crc32_z(0, bytes, stored.size()) != *header.checksum) fail("its checksum does not match");
  }
  const auto bytes = static_cast<size_t>(header.bytes);
  switch (header.type) {
    case ParquetPageHeader::kDictionary:
      return load_dictionary(header, unpack(stored, bytes));
    case ParquetPageHeader::kData:
      return begin_page(header, unpack(stored, bytes));
    case ParquetPageHeader::kDataV2:
      return begin_page_v2(header, stored);
    default:
      break;  // an index, which rows are not read from
  }
}

std::span<const std::byte> ParquetColumn::unpack(std::span<const std::byte> stored, size_t bytes) {
  page_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  const std::span<std::byte> out(page_.get(), bytes);
  decompress_page(chunk_.codec, stored, out, where_);
  return out;
}

void ParquetColumn::load_dictionary(const ParquetPageHeader& header,
                                    std::span<const std::byte> bytes) {
  if (!dictionary_.empty()) fail("a second dictionary");
  if (header.encoding != kParquetPlain && header.encoding != kParquetPlainDictionary) {
    fail(fmt::format("a dictionary in encoding {}", header.encoding));
  }
  // Every value takes four bytes or more, text those of its length.
  if (header.values < 0 || header.values > std::ssize(bytes) / 4) {
    fail(fmt::format("a dictionary of {} values in {} bytes", header.values, bytes.size()));
  }
  dictionary_.reserve(static_cast<size_t>(header.values));
  PlainReader values(bytes, field_, where_);
  for (int32_t i = 0; i < header.values; ++i) dictionary_.push_back(values.next());
}

void ParquetColumn::begin_page(const ParquetPageHeader& header, std::span<const std::byte> bytes) {
  begin_entries(header);
  const bool runs = (field_.max_repetition == 0 || header.repetition_encoding == kParquetRle) &&
                    (field_.definition == 0 || header.definition_encoding == kParquetRle);
  TWELL_REQUIRE(runs, "{}: levels in BIT_PACKED encoding are not read", where_);
  if (field_.max_repetition > 0) {
    repetitions_ = {sized_part(bytes, where_), bits_of(field_.max_repetition), where_};
  }
  if (field_.definition > 0) {
    definitions_ = {sized_part(bytes, where_), bits_of(field_.definition), where_};
  }
  begin_values(header.encoding, bytes);
}

// Version 2 keeps its levels outside of what is compressed.
void ParquetColumn::begin_page_v2(const ParquetPageHeader& header,
                                  std::span<const std::byte> stored) {
  begin_entries(header);
  const int64_t levels = int64_t{header.repetition_bytes} + header.definition_bytes;
  if (header.repetition_bytes < 0 || header.definition_bytes < 0 || levels > std::ssize(stored) ||
      levels > header.bytes) {
    fail(fmt::format("levels of {} and {} bytes in {}", header.repetition_bytes,
                     header.definition_bytes, stored.size()));
  }
  const auto repetition_bytes = static_cast<size_t>(header.repetition_bytes);
  const auto definition_bytes = static_cast<size_t>(header.definition_bytes);
  repetitions_ = {stored.first(repetition_bytes), bits_of(field_.max_repetition), where_};
  definitions_ = {stored.subspan(repetition_bytes, definition_bytes), bits_of(field_.definition),
                  where_};
  stored = stored.subspan(static_cast<size_t>(levels));
  const auto bytes = static_cast<size_t>(header.bytes - levels);
  // Where all are null there may be nothing to decompress.
  const bool packed = header.compressed && !(stored.empty() && bytes == 0);
  begin_values(header.encoding, packed ? unpack(stored, bytes) : stored);
}

void ParquetColumn::begin_entries(const ParquetPageHeader& header) {
  if (header.values < 0 || header.values > left_) {
    fail(fmt::format("{} values where {} are left", header.values, left_));
  }
  page_left_ = header.values;
}

void ParquetColumn::begin_values(int32_t encoding, std::span<const std::byte> bytes) {
  switch (encoding) {
    case kParquetPlain:
      values_ = Values::kPlain;
      plain_ = PlainReader(bytes, field_, where_);
      return;
    case kParquetPlainDictionary:
    case kParquetRleDictionary: {
      values_ = Values::kDictionary;
      // The width of the indices, then runs of them; nothing where all are null.
      const int width = bytes.empty() ? 0 : static_cast<int>(bytes[0]);
      indices_ = {bytes.empty() ? bytes : bytes.subspan(1), width, where_};
      return;
    }
    case kParquetRle:
      if (field_.type == kParquetBoolean) {
        values_ = Values::kRleBoolean;
        indices_ = {bytes.empty() ? bytes : sized_part(bytes, where_), 1, where_};
        return;
      }
      [[fallthrough]];
    default:
      throw InputError(fmt::format("{}: encoding {} is not read (PLAIN and dictionaries are)",
                                   where_, encoding_name(encoding)));
  }
}

}  // namespace twell
