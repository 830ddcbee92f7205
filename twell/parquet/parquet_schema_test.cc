// SPDX-License-Identifier: Apache-2.0
// Tests the list forms of different writers, and schemas that contradict themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "twell/base/error.h"
#include "twell/parquet/schema.h"

namespace twell {
namespace {

using Kind = ParquetField::Kind;

constexpr int32_t kRequired = 0, kOptional = 1, kRepeated = 2;

ParquetSchemaElement group(std::string name, int32_t repetition, int32_t children,
                           ParquetAnnotation annotation = ParquetAnnotation::kNone) {
  return {.name = std::move(name),
          .repetition = repetition,
          .children = children,
          .annotation = annotation,
          .other = {}};
}
ParquetSchemaElement text(std::string name, int32_t repetition) {
  return {.name = std::move(name),
          .type = kParquetByteArray,
          .repetition = repetition,
          .annotation = ParquetAnnotation::kText,
          .other = {}};
}
ParquetSchemaElement list(std::string name, int32_t repetition) {
  return group(std::move(name), repetition, 1, ParquetAnnotation::kList);
}

std::vector<ParquetField> parse(const std::vector<ParquetSchemaElement>& elements) {
  ParquetMetadata metadata;
  metadata.schema = elements;
  return parse_parquet_schema(metadata, "f");
}

// Describes a field as "list(value@3)": its kinds and their definition levels.
std::string shape(const ParquetField& field) {
  if (field.kind == Kind::kValue) return fmt::format("value@{}", field.definition);
  std::string out = field.kind == Kind::kList ? fmt::format("list@{}(", field.definition) : "{";
  for (const ParquetField& child : field.children) out += shape(child);
  return out + (field.kind == Kind::kList ? ")" : "}");
}

std::string shape(const std::vector<ParquetSchemaElement>& elements) {
  return shape(parse(elements).at(0));
}

TEST(ParquetSchema, ListsOfEveryAge) {
  const auto root = group("schema", kRequired, 1);
  // The specified form has three levels.
  EXPECT_EQ(
      shape({root, list("a", kOptional), group("list", kRepeated, 1), text("element", kOptional)}),
      "list@1(value@3)");
  EXPECT_EQ(
      shape({root, list("a", kRequired), group("bag", kRepeated, 1), text("item", kRequired)}),
      "list@0(value@1)");
  // In this older form the repeated field is the element.
  EXPECT_EQ(shape({root, list("a", kOptional), text("element", kRepeated)}), "list@1(value@2)");
  EXPECT_EQ(shape({root, list("a", kOptional), group("element", kRepeated, 2), text("x", kRequired),
                   text("y", kOptional)}),
            "list@1({value@2value@3})");
  for (const char* name : {"array", "a_tuple"}) {
    EXPECT_EQ(shape({root, list("a", kOptional), group(name, kRepeated, 1), text("x", kRequired)}),
              "list@1({value@2})");
  }
  // A repeated field without a LIST around it is a list.
  EXPECT_EQ(shape({root, text("a", kRepeated)}), "list@0(value@1)");
  EXPECT_EQ(shape({root, group("a", kRepeated, 1), text("x", kOptional)}), "list@0({value@2})");
  // This is a list of lists.
  const auto nested =
      parse({root, list("a", kOptional), group("list", kRepeated, 1), list("element", kOptional),
             group("list", kRepeated, 1), text("element", kOptional)});
  EXPECT_EQ(shape(nested[0]), "list@1(list@3(value@5))");
  EXPECT_EQ(nested[0].repetition, 1);
  EXPECT_EQ(nested[0].children[0].repetition, 2);
  EXPECT_EQ(nested[0].children[0].children[0].max_repetition, 2);
}

TEST(ParquetSchema, RefusesContradictions) {
  using testing::HasSubstr;
  const auto fault = [](const std::vector<ParquetSchemaElement>& elements) {
    try {
      parse(elements);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto root = group("schema", kRequired, 1);
  EXPECT_THAT(fault({}), HasSubstr("f: damaged metadata (a schema without a root)"));
  EXPECT_THAT(fault({root}), HasSubstr("that ends early"));
  EXPECT_THAT(fault({group("schema", kRequired, 1 << 30), text("a", 0)}), HasSubstr("ends early"));
  EXPECT_THAT(fault({root, text("a", 0), text("b", 0)}), HasSubstr("fields that belong nowhere"));
  EXPECT_THAT(fault({root, text("a", 3)}), HasSubstr("an unknown repetition"));
  EXPECT_THAT(fault({root, text("\xff", 0)}), HasSubstr("a name not in UTF-8"));
  EXPECT_THAT(fault({root, group("a", 0, 0)}), HasSubstr("an empty group"));
  EXPECT_THAT(fault({group("schema", 0, 2), text("a", 0), text("a", 0)}),
              HasSubstr("two fields of one name"));
  EXPECT_THAT(fault({root, list("a", 0), text("b", kOptional)}), HasSubstr("does not repeat"));
  EXPECT_THAT(fault({root, group("a", 0, 2, ParquetAnnotation::kList), text("b", kRepeated),
                     text("c", kRepeated)}),
              HasSubstr("a LIST of several fields"));
  std::vector<ParquetSchemaElement> deep = {root};
  for (int i = 0; i < 100; ++i) deep.push_back(group("a", kOptional, 1));
  deep.push_back(text("a", 0));
  EXPECT_THAT(fault(deep), HasSubstr("nested too deeply"));
}

}  // namespace
}  // namespace twell
