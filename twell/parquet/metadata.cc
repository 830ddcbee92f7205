// SPDX-License-Identifier: Apache-2.0
// Parses metadata; the field numbers are those of parquet.thrift.
#include "twell/parquet/metadata.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/parquet/thrift.h"

namespace twell {
namespace {

using Type = ThriftType;

constexpr std::string_view kMagic = "PAR1", kEncrypted = "PARE";

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// What a field's annotation means, by its name as a ConvertedType or a LogicalType.
void annotate(std::string_view name, ParquetSchemaElement& out) {
  out.other.clear();
  if (name == "UTF8" || name == "STRING" || name == "ENUM" || name == "JSON") {
    out.annotation = ParquetAnnotation::kText;
  } else if (name == "LIST") {
    out.annotation = ParquetAnnotation::kList;
  } else if (name.starts_with("UINT")) {
    out.annotation = ParquetAnnotation::kUnsigned;
  } else if (name.starts_with("INT_") || name == "UNKNOWN") {  // UNKNOWN: a column of nulls
    out.annotation = ParquetAnnotation::kNone;
  } else {
    out.annotation = ParquetAnnotation::kOther;
    out.other = name;
  }
}

// The names of ConvertedType's values, separated by spaces.
constexpr std::string_view kConvertedTypes =
    "UTF8 MAP MAP_KEY_VALUE LIST ENUM DECIMAL DATE TIME_MILLIS TIME_MICROS TIMESTAMP_MILLIS "
    "TIMESTAMP_MICROS UINT_8 UINT_16 UINT_32 UINT_64 INT_8 INT_16 INT_32 INT_64 JSON BSON INTERVAL";
// The names of LogicalType's fields, from number 1 on.
constexpr std::string_view kLogicalTypes =
    "STRING MAP LIST ENUM DECIMAL DATE TIME TIMESTAMP INTERVAL INTEGER UNKNOWN JSON BSON UUID "
    "FLOAT16 VARIANT";

std::string_view name_at(std::string_view names, int32_t index) {
  for (; index > 0 && !names.empty(); --index) {
    names.remove_prefix(std::min(names.find(' '), names.size() - 1) + 1);
  }
  const std::string_view name = names.substr(0, names.find(' '));
  return index < 0 || name.empty() ? "an unknown annotation" : name;
}

// Reads a LogicalType, a union: the number of its only field says which type it is.
void read_logical_type(ThriftReader& in, ParquetSchemaElement& out) {
  in.fields([&](int32_t id, Type type) {
    const std::string_view name = name_at(kLogicalTypes, id - 1);
    if (name != "INTEGER" || type != Type::kStruct) {
      annotate(name, out);
      return in.skip(type);
    }
    bool is_signed = true;
    in.fields([&](int32_t part, Type part_type) {
      if (part != 2) return in.skip(part_type);
      is_signed = in.boolean(part_type);
    });
    annotate(is_signed ? "INT_" : "UINT", out);
  });
}

ParquetSchemaElement read_schema_element(ThriftReader& in) {
  ParquetSchemaElement out;
  int32_t converted = -1;
  bool logical = false;  // a LogicalType overrides the ConvertedType
  in.fields([&](int32_t id, Type type) {
    if (id == 1) return in.read(type, out.type);
    if (id == 3) return in.read(type, out.repetition);
    if (id == 5) return in.read(type, out.children);
    if (id == 6) return in.read(type, converted);
    if (id == 4) {
      out.name = in.binary(type);
    } else if (id == 10) {
      logical = true;
      read_logical_type(in, out);
    } else {
      in.skip(type);
    }
  });
  if (converted != -1 && !logical) annotate(name_at(kConvertedTypes, converted), out);
  return out;
}

void read_column(ThriftReader& in, ParquetChunk& out) {
  in.fields([&](int32_t id, Type type) {
    if (id == 1) return in.read(type, out.type);
    if (id == 4) return in.read(type, out.codec);
    if (id == 5) return in.read(type, out.values);
    if (id == 7) return in.read(type, out.compressed_bytes);
    if (id == 9) return in.read(type, out.data_page_offset);
    if (id == 11) return in.read(type, out.dictionary_page_offset);
    in.skip(type);
  });
}

ParquetChunk read_chunk(ThriftReader& in) {
  ParquetChunk out;
  bool there = false;
  in.fields([&](int32_t id, Type type) {
    if (id == 3 && type == Type::kStruct) {
      there = true;
      return read_column(in, out);
    }
    // Field 1 is a path to another file; field 8 says how the column is encrypted.
    out.elsewhere |= id == 1 || id == 8;
    in.skip(type);
  });
  out.elsewhere |= !there;
  return out;
}

ParquetRowGroup read_row_group(ThriftReader& in) {
  ParquetRowGroup out;
  in.fields([&](int32_t id, Type type) {
    if (id == 1) return in.structs(type, [&] { out.columns.push_back(read_chunk(in)); });
    if (id == 3) return in.read(type, out.rows);
    in.skip(type);
  });
  return out;
}

}  // namespace

ParquetMetadata parse_parquet_metadata(std::span<const std::byte> file, const std::string& source) {
  constexpr size_t kTail = 8;  // the metadata's size and the closing magic
  TWELL_REQUIRE(!is_lfs_pointer(as_text(file)), "{}: {}", source, kLfsAdvice);
  TWELL_REQUIRE(!as_text(file).ends_with(kEncrypted), "{}: encrypted Parquet is not read", source);
  TWELL_REQUIRE(file.size() >= kMagic.size() + kTail && as_text(file).starts_with(kMagic) &&
                    as_text(file).ends_with(kMagic),
                "{} is not a Parquet file, or a part of one: no \"{}\" at its start and end",
                source, kMagic);
  uint32_t size = 0;
  std::memcpy(&size, file.data() + file.size() - kTail, sizeof(size));
  const size_t room = file.size() - kTail - kMagic.size();
  TWELL_REQUIRE(size <= room, "{}: metadata of {} bytes in a file of {}", source, size,
                file.size());
  ThriftReader in(file.subspan(file.size() - kTail - size, size), source);
  ParquetMetadata out;
  in.fields([&](int32_t id, Type type) {
    if (id == 2) return in.structs(type, [&] { out.schema.push_back(read_schema_element(in)); });
    if (id == 3) return in.read(type, out.rows);
    if (id == 4) return in.structs(type, [&] { out.row_groups.push_back(read_row_group(in)); });
    in.skip(type);
  });
  return out;
}

ParquetPageHeader parse_page_header(std::span<const std::byte> bytes, const std::string& source,
                                    size_t& size) {
  ThriftReader in(bytes, source);
  ParquetPageHeader out;
  const auto read_part = [&](Type type, std::span<int32_t* const> numbers) {
    TWELL_REQUIRE(type == Type::kStruct, "{}: damaged metadata (a page without its kind)", source);
    in.fields([&](int32_t id, Type part) {
      const auto index = static_cast<size_t>(id - 1);
      if (part == Type::kTrue || part == Type::kFalse) {
        if (out.type == ParquetPageHeader::kDataV2 && id == 7) out.compressed = in.boolean(part);
      } else if (id >= 1 && index < numbers.size() && numbers[index] != nullptr) {
        in.read(part, *numbers[index]);
      } else {
        in.skip(part);
      }
    });
  };
  in.fields([&](int32_t id, Type type) {
    if (id == 1) return in.read(type, out.type);
    if (id == 2) return in.read(type, out.bytes);
    if (id == 3) return in.read(type, out.compressed_bytes);
    if (id == 4) {
      int32_t checksum = 0;
      in.read(type, checksum);
      out.checksum = static_cast<uint32_t>(checksum);
    } else if (id == 5) {
      read_part(type, std::array{&out.values, &out.encoding, &out.definition_encoding,
                                 &out.repetition_encoding});
    } else if (id == 7) {
      read_part(type, std::array{&out.values, &out.encoding});
    } else if (id == 8) {
      read_part(type, std::array<int32_t*, 6>{&out.values, nullptr, nullptr, &out.encoding,
                                              &out.definition_bytes, &out.repetition_bytes});
    } else {
      in.skip(type);
    }
  });
  size = in.position();
  return out;
}

}  // namespace twell
