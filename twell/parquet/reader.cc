// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/reader.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "twell/base/error.h"

namespace twell {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr size_t kMaxRowBytes = size_t{64} << 20;
constexpr size_t kValueBytes = 64;  // approximate memory of a value without its text

int64_t count_columns(const ParquetMetadata& metadata) {
  return std::count_if(metadata.schema.begin(), metadata.schema.end(),
                       [](const ParquetSchemaElement& element) { return element.type >= 0; });
}

}  // namespace

ParquetReader::ParquetReader(const fs::path& path, const std::vector<std::string>& names,
                             ParquetRowGroups groups)
    : mapped_(path), file_(mapped_.bytes()), source_(path.string()), groups_(groups) {
  open(names);
}

ParquetReader::ParquetReader(std::span<const std::byte> bytes, std::string source,
                             const std::vector<std::string>& names)
    : file_(bytes), source_(std::move(source)) {
  open(names);
}

void ParquetReader::fail(const std::string& reason) const {
  const std::string where = in_row_group_ ? fmt::format("row group {}: ", next_row_group_) : "";
  throw InputError(fmt::format("{}: {}{}", source_, where, reason));
}

void ParquetReader::open(const std::vector<std::string>& names) {
  metadata_ = parse_parquet_metadata(file_, source_);
  fields_ = parse_parquet_schema(metadata_, source_);
  check_row_groups();
  choose_row_groups();
  choose_fields(names);
}

void ParquetReader::check_row_groups() const {
  const int64_t columns = count_columns(metadata_);
  int64_t rows = 0;
  for (const ParquetRowGroup& group : metadata_.row_groups) {
    if (std::ssize(group.columns) != columns) {
      fail(fmt::format("damaged metadata ({} columns of {} in a row group)", group.columns.size(),
                       columns));
    }
    if (group.rows < 0 || group.rows > metadata_.rows - rows) {
      fail(fmt::format("damaged metadata (a row group of {} rows)", group.rows));
    }
    rows += group.rows;
  }
  if (rows != metadata_.rows) {
    fail(fmt::format("damaged metadata ({} rows, {} in row groups)", metadata_.rows, rows));
  }
}

void ParquetReader::choose_row_groups() {
  const std::vector<ParquetRowGroup>& all = metadata_.row_groups;
  const bool whole = groups_ == ParquetRowGroups{};
  groups_.end = std::min(groups_.end, all.size());
  const std::vector<int64_t> bytes = row_group_bytes();
  for (size_t g = 0; g < groups_.end; ++g) {
    if (g < groups_.first) {
      rows_before_ += all[g].rows;
      continue;
    }
    rows_to_read_ += all[g].rows;
    groups_bytes_ += bytes[g];
  }
  if (whole) groups_bytes_ = std::ssize(file_);
  row_ = rows_before_;
  next_row_group_ = groups_.first;
}

// Damaged sizes are limited to the file's, so that their sums cannot overflow.
std::vector<int64_t> ParquetReader::row_group_bytes() const {
  std::vector<int64_t> bytes;
  for (const ParquetRowGroup& group : metadata_.row_groups) {
    int64_t sum = 0;
    for (const ParquetChunk& chunk : group.columns) {
      sum = std::min(std::ssize(file_),
                     sum + std::clamp<int64_t>(chunk.compressed_bytes, 0, std::ssize(file_)));
    }
    bytes.push_back(sum);
  }
  return bytes;
}

void ParquetReader::choose_fields(const std::vector<std::string>& names) {
  std::vector<ParquetField> chosen;
  std::string known;
  for (ParquetField& field : fields_) {
    known += (known.empty() ? "" : ", ") + field.name;
    const bool named = std::find(names.begin(), names.end(), field.name) != names.end();
    if (named || names.empty()) chosen.push_back(std::move(field));
  }
  for (const std::string& name : names) {
    const bool found = std::any_of(chosen.begin(), chosen.end(),
                                   [&](const ParquetField& field) { return field.name == name; });
    if (!found) fail(fmt::format("no column \"{}\"; there are {}", name, known));
  }
  fields_ = std::move(chosen);
  for (const ParquetField& field : fields_) {
    std::vector<const ParquetField*> values;
    field.append_columns(values);
    for (const ParquetField* value : values) {
      if (value->refusal.empty()) continue;
      fail(fmt::format("column {}: {} is not read", field.name, value->refusal));
    }
  }
}

bool ParquetReader::require_no_values(const ParquetRowGroup& group) const {
  for (const ParquetChunk& chunk : group.columns) {
    if (chunk.values != 0) fail(fmt::format("damaged: {} values of no rows", chunk.values));
  }
  return true;
}

bool ParquetReader::begin_row_group() {
  open_.clear();
  in_row_group_ = false;
  if (next_row_group_ >= groups_.end) return false;
  const ParquetRowGroup& group = metadata_.row_groups[next_row_group_++];
  in_row_group_ = true;
  rows_left_ = group.rows;
  // The columns of a group without rows may have no pages, so their offsets mean nothing.
  if (group.rows == 0) return require_no_values(group);
  by_column_.assign(group.columns.size(), nullptr);
  for (const ParquetField& field : fields_) {
    std::vector<const ParquetField*> values;
    field.append_columns(values);
    const std::string where =
        fmt::format("{}: row group {}: column {}", source_, next_row_group_, field.name);
    for (const ParquetField* value : values) {
      const auto index = static_cast<size_t>(value->column);
      by_column_[index] = &open_.emplace_back(file_, group.columns[index], *value, memory_, where);
    }
  }
  return true;
}

bool ParquetReader::next(json& row) {
  while (rows_left_ == 0) {
    for (const ParquetColumn& column : open_) {
      if (!column.at_end()) fail(fmt::format("damaged: more values than {} rows have", row_));
    }
    if (!begin_row_group()) return false;
  }
  --rows_left_;
  ++row_;
  row_bytes_ = 0;
  row = json::object();
  for (const ParquetField& field : fields_) row[field.name] = read(field, 0);
  return true;
}

int64_t ParquetReader::file_bytes_read() const {
  const double share = static_cast<double>(row_ - rows_before_) /
                       static_cast<double>(std::max<int64_t>(rows_to_read_, 1));
  return static_cast<int64_t>(static_cast<double>(groups_bytes_) * share);
}

void ParquetReader::spend(size_t bytes) {
  row_bytes_ += bytes;
  if (row_bytes_ > kMaxRowBytes) {
    fail(fmt::format("row {} takes more than {} MiB", row_, kMaxRowBytes >> 20));
  }
}

ParquetColumn& ParquetReader::column(const ParquetField& field) {
  ParquetColumn& found = *by_column_[static_cast<size_t>(field.column)];
  if (found.at_end()) fail(fmt::format("damaged: a column without values of row {}", row_));
  return found;
}

ParquetColumn& ParquetReader::first_column(const ParquetField& field) {
  const ParquetField* value = &field;
  while (value->kind != ParquetField::Kind::kValue) value = &value->children.front();
  return column(*value);
}

// All columns below a field must agree on its levels, so the first column decides here and the
// others are checked when they are read.
json ParquetReader::read(const ParquetField& field, int repetition) {
  spend(kValueBytes);
  if (field.kind == ParquetField::Kind::kValue) return read_value(field, repetition);
  if (first_column(field).definition() < field.definition) return read_absent(field, repetition);
  if (field.kind == ParquetField::Kind::kList) return read_list(field, repetition);
  json out = json::object();
  for (const ParquetField& child : field.children) {
    spend(child.name.size());
    out[child.name] = read(child, repetition);
  }
  return out;
}

json ParquetReader::read_list(const ParquetField& field, int repetition) {
  ParquetColumn& first = first_column(field);
  json out = json::array();
  if (first.definition() < field.element_definition) {
    read_absent(field, repetition);
    return out;
  }
  const ParquetField& element = field.children.front();
  out.push_back(read(element, repetition));
  while (!first.at_end() && first.repetition() == field.repetition) {
    out.push_back(read(element, field.repetition));
  }
  return out;
}

// Takes the column's next entry, which must have these levels.
ParquetValue ParquetReader::take(const ParquetField& field, int repetition, int definition) {
  ParquetColumn& at = column(field);
  if (at.definition() != definition || at.repetition() != repetition) {
    fail(fmt::format("damaged: the columns of row {} contradict each other", row_));
  }
  return at.take();
}

// Reads a null or empty field: each column below it has one entry with the same levels.
json ParquetReader::read_absent(const ParquetField& field, int repetition) {
  const int definition = first_column(field).definition();
  std::vector<const ParquetField*> values;
  field.append_columns(values);
  for (const ParquetField* value : values) {
    take(*value, repetition, definition);
  }
  return nullptr;
}

json ParquetReader::read_value(const ParquetField& field, int repetition) {
  const ParquetValue taken = take(field, repetition, column(field).definition());
  return std::visit(
      [this](const auto& value) -> json {
        using Kind = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Kind, std::monostate>)
          return nullptr;
        else if constexpr (std::is_same_v<Kind, std::string_view>)
          spend(value.size());
        if constexpr (!std::is_same_v<Kind, std::monostate>) return value;
      },
      taken);
}

}  // namespace twell
