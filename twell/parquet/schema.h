// SPDX-License-Identifier: Apache-2.0
// The fields of a Parquet file as a tree of values: what a row looks like, and how the columns'
// definition and repetition levels say what of it is there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twell/parquet/metadata.h"

namespace twell {

// Levels count along the path from the root: an optional field adds a definition level, a repeated
// one a definition and a repetition level.
struct ParquetField {
  enum class Kind { kValue, kObject, kList };

  std::string name;
  Kind kind = Kind::kValue;
  int definition = 0;                  // the field is there, not null, from this level on
  int element_definition = 0;          // lists: not empty from this level on
  int repetition = 0;                  // lists: an entry of this level is the list's next element
  std::vector<ParquetField> children;  // of an object; a list's element
  // Values: which of the file's columns, counted along the schema; its physical type.
  int64_t column = -1;
  int32_t type = -1;
  bool is_unsigned = false;
  int max_repetition = 0;  // of the column
  std::string refusal;     // why a value or what it is in cannot be read; empty when it can

  // The columns of the values below, the field itself included, in order.
  void append_columns(std::vector<const ParquetField*>& out) const;
};

// The top-level fields. Columns of types that are not read, and maps, carry a refusal, so that they
// can be passed over. InputError, naming the source, when the schema contradicts itself.
std::vector<ParquetField> parse_parquet_schema(const ParquetMetadata& metadata,
                                               const std::string& source);

}  // namespace twell
