// SPDX-License-Identifier: Apache-2.0
// Parses metadata; the field numbers are those of parquet.thrift.
#include "twell/parquet/metadata.h"

#include <array>
#include <cstring>

#include "twell/base/error.h"
#include "twell/parquet/thrift.h"

namespace twell {
namespace {

using Type = ThriftType;

constexpr std::string_view kMagic = "PAR1", kEncrypted = "PARE";

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void set_annotation(ParquetSchemaElement& out, ParquetAnnotation annotation,
                    std::string_view other = {}) {
  out.annotation = annotation;
  out.other = other;
}

// Maps a ConvertedType to an annotation.
void read_converted_type(int32_t value, ParquetSchemaElement& out) {
  static constexpr std::array<std::string_view, 22> kNames = {"UTF8",
                                                              "MAP",
                                                              "MAP_KEY_VALUE",
                                                              "LIST",
                                                              "ENUM",
                                                              "DECIMAL",
                                                              "DATE",
                                                              "TIME_MILLIS",
                                                              "TIME_MICROS",
                                                              "TIMESTAMP_MILLIS",
                                                              "TIMESTAMP_MICROS",
                                                              "UINT_8",
                                                              "UINT_16",
                                                              "UINT_32",
                                                              "UINT_64",
                                                              "INT_8",
                                                              "INT_16",
                                                              "INT_32",
                                                              "INT_64",
                                                              "JSON",
                                                              "BSON",
                                                              "INTERVAL"};
  const auto index = static_cast<size_t>(value);
  const std::string_view name = index < kNames.size() ? kNames[index] : "an unknown annotation";
  if (name == "UTF8" || name == "ENUM" || name == "JSON") {
    set_annotation(out, ParquetAnnotation::kText);
  } else if (name == "LIST") {
    set_annotation(out, ParquetAnnotation::kList);
  } else if (name.starts_with("INT_")) {
    set_annotation(out, ParquetAnnotation::kInteger);
  } else if (name.starts_with("UINT_")) {
    set_annotation(out, ParquetAnnotation::kUnsigned);
  } else {
    set_annotation(out, ParquetAnnotation::kOther, name);
  }
}

// Reads a LogicalType, a union: the number of its only field says which type it is.
void read_logical_type(ThriftReader& in, ParquetSchemaElement& out) {
  static constexpr std::array<std::string_view, 17> kNames = {
      "",         "STRING",  "MAP",     "LIST", "ENUM", "DECIMAL", "DATE",    "TIME",   "TIMESTAMP",
      "INTERVAL", "INTEGER", "UNKNOWN", "JSON", "BSON", "UUID",    "FLOAT16", "VARIANT"};
  in.fields([&](int32_t id, Type type) {
    const auto index = static_cast<size_t>(id);
    const std::string_view name = index < kNames.size() ? kNames[index] : "an unknown annotation";
    if (name == "INTEGER" && type == Type::kStruct) {
      set_annotation(out, ParquetAnnotation::kInteger);
      in.fields([&](int32_t part, Type part_type) {
        if (part == 2 && !in.boolean(part_type)) {
          set_annotation(out, ParquetAnnotation::kUnsigned);
        } else if (part != 2) {
          in.skip(part_type);
        }
      });
      return;
    }
    if (name == "STRING" || name == "ENUM" || name == "JSON") {
      set_annotation(out, ParquetAnnotation::kText);
    } else if (name == "LIST") {
      set_annotation(out, ParquetAnnotation::kList);
    } else if (name == "UNKNOWN") {
      set_annotation(out, ParquetAnnotation::kNone);  // a column of nulls
    } else {
      set_annotation(out, ParquetAnnotation::kOther, name);
    }
    in.skip(type);
  });
}

ParquetSchemaElement read_schema_element(ThriftReader& in) {
  ParquetSchemaElement out;
  bool logical = false;  // a LogicalType was read; it overrides the ConvertedType
  in.fields([&](int32_t id, Type type) {
    switch (id) {
      case 1:
        out.type = in.integer32(type);
        break;
      case 3:
        out.repetition = in.integer32(type);
        break;
      case 4:
        out.name = in.binary(type);
        break;
      case 5:
        out.children = in.integer32(type);
        break;
      case 6: {
        const int32_t converted = in.integer32(type);
        if (!logical) read_converted_type(converted, out);
        break;
      }
      case 10:
        logical = true;
        read_logical_type(in, out);
        break;
      default:
        in.skip(type);
    }
  });
  return out;
}

void read_column(ThriftReader& in, ParquetChunk& out) {
  in.fields([&](int32_t id, Type type) {
    switch (id) {
      case 1:
        out.type = in.integer32(type);
        break;
      case 4:
        out.codec = in.integer32(type);
        break;
      case 5:
        out.values = in.integer(type);
        break;
      case 7:
        out.compressed_bytes = in.integer(type);
        break;
      case 9:
        out.data_page_offset = in.integer(type);
        break;
      case 11:
        out.dictionary_page_offset = in.integer(type);
        break;
      default:
        in.skip(type);
    }
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
    if (id == 1) {
      in.elements(type, Type::kStruct, [&] { out.columns.push_back(read_chunk(in)); });
    } else if (id == 3) {
      out.rows = in.integer(type);
    } else {
      in.skip(type);
    }
  });
  return out;
}

}  // namespace

ParquetMetadata parse_parquet_metadata(std::span<const std::byte> file, const std::string& source) {
  constexpr size_t kTail = 8;  // the metadata's size and the closing magic
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
    switch (id) {
      case 2:
        in.elements(type, Type::kStruct, [&] { out.schema.push_back(read_schema_element(in)); });
        break;
      case 3:
        out.rows = in.integer(type);
        break;
      case 4:
        in.elements(type, Type::kStruct, [&] { out.row_groups.push_back(read_row_group(in)); });
        break;
      default:
        in.skip(type);
    }
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
        *numbers[index] = in.integer32(part);
      } else {
        in.skip(part);
      }
    });
  };
  in.fields([&](int32_t id, Type type) {
    switch (id) {
      case 1:
        out.type = in.integer32(type);
        break;
      case 2:
        out.bytes = in.integer32(type);
        break;
      case 3:
        out.compressed_bytes = in.integer32(type);
        break;
      case 4:
        out.checksum = static_cast<uint32_t>(in.integer32(type));
        break;
      case 5:
        read_part(type, std::array{&out.values, &out.encoding, &out.definition_encoding,
                                   &out.repetition_encoding});
        break;
      case 7:
        read_part(type, std::array{&out.values, &out.encoding});
        break;
      case 8:
        read_part(type, std::array<int32_t*, 6>{&out.values, nullptr, nullptr, &out.encoding,
                                                &out.definition_bytes, &out.repetition_bytes});
        break;
      default:
        in.skip(type);
    }
  });
  size = in.position();
  return out;
}

}  // namespace twell
