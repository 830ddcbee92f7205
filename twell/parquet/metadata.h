// SPDX-License-Identifier: Apache-2.0
// The part of a Parquet file's metadata (parquet.thrift) that is needed to read rows.
//
// Numbers and names are the format's. Only the encoding is checked here; users of the metadata
// check that its values are consistent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace twell {

// What a field's annotation (LogicalType, or the older ConvertedType) says about its values.
enum class ParquetAnnotation { kNone, kText, kUnsigned, kList, kOther };

enum class ParquetRepetition : int32_t { kRequired = 0, kOptional = 1, kRepeated = 2 };

// Physical types (Type of parquet.thrift).
inline constexpr int32_t kParquetBoolean = 0, kParquetInt32 = 1, kParquetInt64 = 2,
                         kParquetFloat = 4, kParquetDouble = 5, kParquetByteArray = 6;
// Encodings (Encoding of parquet.thrift).
inline constexpr int32_t kParquetPlain = 0, kParquetPlainDictionary = 2, kParquetRle = 3,
                         kParquetRleDictionary = 8;

struct ParquetSchemaElement {
  std::string name;
  int32_t type = -1;  // physical; -1 for groups
  int32_t repetition = 0;
  int32_t children = 0;  // number of child elements, which follow depth first
  ParquetAnnotation annotation = ParquetAnnotation::kNone;
  std::string other;  // name of an unsupported annotation
};

struct ParquetChunk {  // the values of a column in a row group
  int32_t type = -1;
  int32_t codec = 0;
  int64_t values = 0;  // entries, including nulls and empty lists
  int64_t compressed_bytes = 0;
  int64_t data_page_offset = 0,
          dictionary_page_offset = 0;  // byte offsets in the file; 0: no dictionary
  bool elsewhere = false;              // stored in another file, or encrypted
};

struct ParquetRowGroup {
  int64_t rows = 0;
  std::vector<ParquetChunk> columns;
};

struct ParquetMetadata {
  int64_t rows = 0;
  std::vector<ParquetSchemaElement> schema;  // depth first, starting with the root
  std::vector<ParquetRowGroup> row_groups;
};

struct ParquetPageHeader {
  // Page types; pages of other types are skipped.
  static constexpr int32_t kData = 0, kDictionary = 2, kDataV2 = 3;

  int32_t type = -1;
  int32_t bytes = 0, compressed_bytes = 0;
  std::optional<uint32_t> checksum;  // CRC-32 of the compressed bytes
  int32_t values = 0;
  int32_t encoding = -1;
  int32_t definition_encoding = kParquetRle, repetition_encoding = kParquetRle;  // version 1
  int32_t definition_bytes = 0, repetition_bytes = 0;                            // version 2
  bool compressed = true;                                                        // version 2
};

// Parses the metadata at the end of a file's bytes. InputError, naming the source, when it fails.
ParquetMetadata parse_parquet_metadata(std::span<const std::byte> file, const std::string& source);

// Parses the header at the start of the bytes; sets `size` to its length in bytes.
ParquetPageHeader parse_page_header(std::span<const std::byte> bytes, const std::string& source,
                                    size_t& size);

}  // namespace twell
