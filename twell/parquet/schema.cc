// SPDX-License-Identifier: Apache-2.0
#include "twell/parquet/schema.h"

#include <algorithm>
#include <array>

#include "twell/base/error.h"
#include "twell/base/utf8.h"

namespace twell {
namespace {

using Kind = ParquetField::Kind;

constexpr int kMaxDepth = 32;

struct Levels {
  int definition = 0, repetition = 0;
};

class SchemaReader {
 public:
  SchemaReader(const ParquetMetadata& metadata, const std::string& source)
      : elements_(metadata.schema), source_(source) {}

  std::vector<ParquetField> read() {
    require(!elements_.empty() && elements_[0].type < 0, "without a root");
    std::vector<ParquetField> fields = read_children(take(), {}, 0);
    require(next_ == elements_.size(), "with fields that belong nowhere");
    return fields;
  }

 private:
  void require(bool condition, std::string_view fault) const {
    TWELL_REQUIRE(condition, "{}: damaged metadata (a schema {})", source_, fault);
  }

  const ParquetSchemaElement& take() {
    require(next_ < elements_.size(), "that ends early");
    const ParquetSchemaElement& element = elements_[next_++];
    require(element.repetition >= 0 && element.repetition <= 2, "with an unknown repetition");
    require(find_invalid_utf8(element.name) == element.name.size(), "with a name not in UTF-8");
    const auto left = static_cast<int64_t>(elements_.size() - next_);
    require(element.children >= 0 && element.children <= left, "that ends early");
    return element;
  }

  std::vector<ParquetField> read_children(const ParquetSchemaElement& group, Levels levels,
                                          int depth) {
    require(depth < kMaxDepth, "nested too deeply");
    require(group.children > 0, "with an empty group");
    std::vector<ParquetField> out;
    for (int32_t i = 0; i < group.children; ++i) out.push_back(read_field(levels, depth + 1));
    std::vector<std::string_view> names;
    for (const ParquetField& field : out) names.push_back(field.name);
    std::sort(names.begin(), names.end());
    require(std::adjacent_find(names.begin(), names.end()) == names.end(),
            "with two fields of one name");
    return out;
  }

  // A repeated field outside a LIST is itself a list.
  ParquetField read_field(Levels levels, int depth) {
    const ParquetSchemaElement& element = take();
    const auto repetition = static_cast<ParquetRepetition>(element.repetition);
    if (repetition == ParquetRepetition::kRepeated) {
      ParquetField list = begin_list(element.name, levels);
      list.children.push_back(read_value(element, enter_list(levels), depth));
      return list;
    }
    if (repetition == ParquetRepetition::kOptional) ++levels.definition;
    return read_value(element, levels, depth);
  }

  static ParquetField begin_list(const std::string& name, Levels outer) {
    ParquetField list;
    list.name = name;
    list.kind = Kind::kList;
    list.definition = outer.definition;
    list.element_definition = outer.definition + 1;
    list.repetition = outer.repetition + 1;
    return list;
  }
  static Levels enter_list(Levels outer) {
    return {.definition = outer.definition + 1, .repetition = outer.repetition + 1};
  }

  // Reads what the element describes; `levels` already include the element's own.
  ParquetField read_value(const ParquetSchemaElement& element, Levels levels, int depth) {
    if (element.type < 0 && element.annotation == ParquetAnnotation::kList) {
      return read_list(element, levels, depth);
    }
    ParquetField out;
    out.name = element.name;
    out.definition = levels.definition;
    if (element.type < 0) {
      out.kind = Kind::kObject;
      out.children = read_children(element, levels, depth);
      if (element.annotation == ParquetAnnotation::kOther) refuse(out, element.other);
      return out;
    }
    require(element.children == 0, "with a column that has fields");
    out.column = columns_++;
    out.type = element.type;
    out.is_unsigned = element.annotation == ParquetAnnotation::kUnsigned;
    out.max_repetition = levels.repetition;
    out.refusal = refusal(element);
    return out;
  }

  // Reads LIST group { repeated group list { element } } and the older forms, in which the repeated
  // field is the element itself.
  ParquetField read_list(const ParquetSchemaElement& group, Levels levels, int depth) {
    require(depth < kMaxDepth, "nested too deeply");
    require(group.children == 1, "with a LIST of several fields");
    const ParquetSchemaElement& repeated = take();
    require(repeated.repetition == static_cast<int32_t>(ParquetRepetition::kRepeated),
            "with a LIST that does not repeat");
    ParquetField list = begin_list(group.name, levels);
    levels = enter_list(levels);
    const bool is_element = repeated.type >= 0 || repeated.children != 1 ||
                            repeated.name == "array" || repeated.name == group.name + "_tuple";
    list.children.push_back(is_element ? read_value(repeated, levels, depth + 1)
                                       : read_field(levels, depth + 1));
    return list;
  }

  static void refuse(ParquetField& field, const std::string& why) {
    if (field.kind == Kind::kValue) field.refusal = why;
    for (ParquetField& child : field.children) refuse(child, why);
  }

  static std::string refusal(const ParquetSchemaElement& element) {
    static constexpr std::array<const char*, 8> kTypes = {
        "BOOLEAN", "INT32",  "INT64",      "INT96",
        "FLOAT",   "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"};
    if (element.annotation == ParquetAnnotation::kOther) return element.other;
    if (element.type == kParquetByteArray) {
      return element.annotation == ParquetAnnotation::kText ? "" : "BYTE_ARRAY without UTF8";
    }
    for (const int32_t number :
         {kParquetBoolean, kParquetInt32, kParquetInt64, kParquetFloat, kParquetDouble}) {
      if (element.type == number) return {};
    }
    const auto index = static_cast<size_t>(element.type);
    return index < kTypes.size() ? kTypes[index] : fmt::format("type {}", element.type);
  }

  const std::vector<ParquetSchemaElement>& elements_;
  const std::string& source_;
  size_t next_ = 0;
  int64_t columns_ = 0;
};

}  // namespace

void ParquetField::append_columns(std::vector<const ParquetField*>& out) const {
  if (kind == Kind::kValue) out.push_back(this);
  for (const ParquetField& child : children) child.append_columns(out);
}

std::vector<ParquetField> parse_parquet_schema(const ParquetMetadata& metadata,
                                               const std::string& source) {
  return SchemaReader(metadata, source).read();
}

}  // namespace twell
