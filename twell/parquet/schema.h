// SPDX-License-Identifier: Apache-2.0
// The fields of a Parquet file as a tree: the structure of a row, and the definition and repetition
// levels that say which parts of it are present.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twell/parquet/metadata.h"

namespace twell {

// Levels count from the root down: an optional field adds a definition level; a repeated field adds
// a definition and a repetition level.
struct ParquetField {
  enum class Kind { kValue, kObject, kList };

  std::string name;
  Kind kind = Kind::kValue;
  int definition = 0;                  // not null at this definition level or above
  int element_definition = 0;          // lists: not empty at this level or above
  int repetition = 0;                  // lists: level of an entry that is the next element
  std::vector<ParquetField> children;  // an object's fields, or a list's element
  // For values: the column's index in the file, in schema order, and its physical type.
  int64_t column = -1;
  int32_t type = -1;
  bool is_unsigned = false;
  int max_repetition = 0;  // for values: of the column
  std::string refusal;     // why the field cannot be read; empty when it can

  // Appends the value fields at or below this field, in column order.
  void append_columns(std::vector<const ParquetField*>& out) const;
};

// The top-level fields. Maps and columns of unsupported types carry a refusal, so that files which
// have them can be read without them. InputError, naming the source, on a contradictory schema.
std::vector<ParquetField> parse_parquet_schema(const ParquetMetadata& metadata,
                                               const std::string& source);

}  // namespace twell
