// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/column.h"

#include <snappy-c.h>
#include <zlib.h>
#include <zstd.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "twell/base/error.h"
#include "twell/base/utf8.h"

namespace twell {
namespace {

constexpr int32_t kMaxPageBytes = 512 << 20;
constexpr size_t kMaxHeldBytes = size_t{1} << 30;

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

// Takes the levels of a version 1 page: their size in bytes, then the data.
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

// ---- page decompression

// Each returns the bytes written; any number other than out.size() means damaged data.

size_t copy(std::span<const std::byte> in, std::span<std::byte> out) {
  if (in.size() == out.size() && !in.empty()) std::memcpy(out.data(), in.data(), in.size());
  return in.size();
}

size_t unsnappy(std::span<const std::byte> in, std::span<std::byte> out) {
  const auto* source = reinterpret_cast<const char*>(in.data());
  size_t size = 0;
  if (snappy_uncompressed_length(source, in.size(), &size) != SNAPPY_OK || size != out.size()) {
    return out.size() + 1;
  }
  const auto status =
      snappy_uncompress(source, in.size(), reinterpret_cast<char*>(out.data()), &size);
  return status == SNAPPY_OK ? size : out.size() + 1;
}

// Decompresses consecutive gzip members or zlib streams.
size_t gunzip(std::span<const std::byte> in, std::span<std::byte> out) {
  z_stream stream{};
  constexpr int kGzipOrZlib = 32;
  TWELL_CHECK(inflateInit2(&stream, MAX_WBITS + kGzipOrZlib) == Z_OK, "zlib failed to start");
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(in.data()));
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  int code = inflate(&stream, Z_FINISH);
  while (code == Z_STREAM_END && stream.avail_in > 0) {
    inflateReset(&stream);
    code = inflate(&stream, Z_FINISH);
  }
  const size_t written = out.size() - stream.avail_out;
  inflateEnd(&stream);
  return code == Z_STREAM_END ? written : out.size() + 1;
}

size_t unzstd(std::span<const std::byte> in, std::span<std::byte> out) {
  const size_t size = ZSTD_decompress(out.data(), out.size(), in.data(), in.size());
  return ZSTD_isError(size) != 0 ? out.size() + 1 : size;
}

// How pages are compressed. kCodecs is indexed by CompressionCodec of parquet.thrift.
struct Codec {
  const char* name;
  size_t (*unpack)(std::span<const std::byte> in, std::span<std::byte> out);  // null: not read
};
constexpr std::array<Codec, 8> kCodecs = {{{"UNCOMPRESSED", copy},
                                           {"SNAPPY", unsnappy},
                                           {"GZIP", gunzip},
                                           {"LZO", nullptr},
                                           {"BROTLI", nullptr},
                                           {"LZ4", nullptr},
                                           {"ZSTD", unzstd},
                                           {"LZ4_RAW", nullptr}}};

}  // namespace

void ParquetMemory::take(size_t bytes, const std::string& where) {
  TWELL_REQUIRE(bytes <= kMaxHeldBytes - held_,
                "{}: the pages of a row's columns take more than {} MiB decompressed", where,
                kMaxHeldBytes >> 20);
  held_ += bytes;
}

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

ParquetValue PlainReader::next() {
  switch (field_->type) {
    case kParquetBoolean: {
      TWELL_REQUIRE(!bytes_.empty(), "{}: a damaged page (values end early)", *where_);
      const bool value = ((static_cast<uint32_t>(bytes_[0]) >> bit_) & 1) != 0;
      bit_ = (bit_ + 1) % 8;
      if (bit_ == 0) take(1);
      return value;
    }
    case kParquetInt32:
      if (field_->is_unsigned) return uint64_t{number<uint32_t>()};
      return int64_t{number<int32_t>()};
    case kParquetInt64:
      if (field_->is_unsigned) return number<uint64_t>();
      return number<int64_t>();
    case kParquetFloat:
      return double{number<float>()};
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
                             const ParquetField& field, ParquetMemory& memory, std::string where)
    : chunk_(chunk), field_(field), memory_(memory), where_(std::move(where)), left_(chunk.values) {
  TWELL_REQUIRE(!chunk.elsewhere, "{}: in another file, or encrypted", where_);
  TWELL_REQUIRE(chunk.type == field.type, "{}: of type {}, where the schema says {}", where_,
                chunk.type, field.type);
  const auto codec = static_cast<size_t>(chunk.codec);
  TWELL_REQUIRE(codec < kCodecs.size() && kCodecs[codec].unpack != nullptr,
                "{}: compression {} is not read (SNAPPY, GZIP, ZSTD and none are)", where_,
                codec < kCodecs.size() ? kCodecs[codec].name : std::to_string(chunk.codec));
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

ParquetColumn::~ParquetColumn() { memory_.give_back(page_bytes_ + dictionary_bytes_); }

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

ParquetValue ParquetColumn::take() {
  load_entry();
  loaded_ = false;
  --left_;
  if (definition_ < field_.definition) return {};
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
      return load_dictionary(header, stored);
    case ParquetPageHeader::kData:
      return begin_page(header, unpack(stored, bytes));
    case ParquetPageHeader::kDataV2:
      return begin_page_v2(header, stored);
    default:
      break;  // an index page, which holds no rows
  }
}

std::span<const std::byte> ParquetColumn::unpack(std::span<const std::byte> stored, size_t bytes) {
  give_back_page();
  memory_.take(bytes, where_);
  page_bytes_ = bytes;
  page_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  const std::span<std::byte> out(page_.get(), bytes);
  if (kCodecs[static_cast<size_t>(chunk_.codec)].unpack(stored, out) != bytes) {
    fail(fmt::format("{} bytes do not decompress to {}", stored.size(), bytes));
  }
  return out;
}

void ParquetColumn::give_back_page() {
  page_.reset();
  memory_.give_back(std::exchange(page_bytes_, 0));
}

void ParquetColumn::load_dictionary(const ParquetPageHeader& header,
                                    std::span<const std::byte> stored) {
  if (!dictionary_.empty()) fail("a second dictionary");
  if (header.encoding != kParquetPlain && header.encoding != kParquetPlainDictionary) {
    fail(fmt::format("a dictionary in encoding {}", header.encoding));
  }
  // Every value takes at least four bytes, as a text has a length field. A dictionary may hold more
  // values than the chunk, because some writers store it whole with every chunk.
  if (header.values < 0 || header.values > header.bytes / 4) {
    fail(fmt::format("a dictionary of {} values in {} bytes", header.values, header.bytes));
  }
  const auto values = static_cast<size_t>(header.values);
  PlainReader reader(unpack(stored, static_cast<size_t>(header.bytes)), field_, where_);
  memory_.take(values * sizeof(ParquetValue), where_);
  dictionary_page_ = std::move(page_);
  dictionary_bytes_ = std::exchange(page_bytes_, 0) + values * sizeof(ParquetValue);
  dictionary_.reserve(values);
  for (size_t i = 0; i < values; ++i) dictionary_.push_back(reader.next());
}

void ParquetColumn::begin_page(const ParquetPageHeader& header, std::span<const std::byte> bytes) {
  begin_entries(header);
  if (header.values == 0) return;  // such a page may have no levels either
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

// Version 2 pages store their levels uncompressed, before the compressed values.
void ParquetColumn::begin_page_v2(const ParquetPageHeader& header,
                                  std::span<const std::byte> stored) {
  begin_entries(header);
  if (header.values == 0) return;
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
  // A page of nulls may have no data to decompress.
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
      // The index width (one byte), then runs of indices; empty in a page of nulls.
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
