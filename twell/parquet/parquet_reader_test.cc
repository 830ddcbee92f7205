// SPDX-License-Identifier: Apache-2.0
// Rows against files of pyarrow (tests/golden/make_parquet_golden.py), what is refused by name, and
// damaged files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/parquet/reader.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

fs::path golden(const std::string& name) {
  return fs::path(TWELL_SOURCE_DIR) / "tests" / "golden" / "parquet" / name;
}

json read_all(ParquetReader& reader) {
  json rows = json::array(), row;
  while (reader.next(row)) rows.push_back(row);
  return rows;
}

// What the reader says about the bytes; empty when it reads them all.
std::string fault(std::string_view file, const std::vector<std::string>& names = {}) {
  try {
    ParquetReader reader(std::as_bytes(std::span(file)), "f", names);
    read_all(reader);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

class ParquetFiles : public testing::TestWithParam<const char*> {};

TEST_P(ParquetFiles, HoldTheirRows) {
  const json expected = json::parse(read_file(golden("rows.json")));
  ParquetReader reader(golden(std::string(GetParam()) + ".parquet"));
  EXPECT_EQ(reader.rows(), std::ssize(expected));
  json row;
  for (const json& wanted : expected) {
    ASSERT_TRUE(reader.next(row));
    ASSERT_EQ(row, wanted) << "row " << reader.row();
  }
  EXPECT_FALSE(reader.next(row));
  EXPECT_FALSE(reader.next(row));
}

TEST_P(ParquetFiles, OfWhichOnlySomeFieldsAreRead) {
  const json expected = json::parse(read_file(golden("rows.json")));
  ParquetReader reader(golden(std::string(GetParam()) + ".parquet"), {"people", "text"});
  for (const json& wanted : expected) {
    json row;
    ASSERT_TRUE(reader.next(row));
    ASSERT_EQ(row, (json{{"text", wanted["text"]}, {"people", wanted["people"]}}));
  }
}

TEST_P(ParquetFiles, DamagedOnesAreRefusedOrReadButNothingElse) {
  const std::string file = read_file(golden(std::string(GetParam()) + ".parquet"));
  for (size_t size = 0; size < file.size(); size += 61) {
    EXPECT_NE(fault(std::string_view(file).substr(0, size)), "") << size;
  }
  int refused = 0;
  for (size_t at = 0; at < file.size(); at += 23) {
    std::string damaged = file;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
    refused += fault(damaged).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 10);
}

INSTANTIATE_TEST_SUITE_P(Golden, ParquetFiles,
                         testing::Values("none-v1-dictionary", "none-v2-plain", "snappy-v1-plain",
                                         "snappy-v2-dictionary", "gzip-v1-dictionary",
                                         "gzip-v2-plain", "zstd-v1-plain", "zstd-v2-dictionary"));

TEST(ParquetReader, RefusesByName) {
  const std::string file = read_file(golden("refused.parquet"));
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"binary", "f: column binary: BYTE_ARRAY without UTF8 is not read"},
      {"fixed", "f: column fixed: FIXED_LEN_BYTE_ARRAY is not read"},
      {"date", "f: column date: DATE is not read"},
      {"time", "f: column time: TIMESTAMP is not read"},
      {"decimal", "f: column decimal: DECIMAL is not read"},
      {"map", "f: column map: MAP is not read"},
      {"delta", "f: column delta: encoding DELTA_BINARY_PACKED is not read"},
      {"delta_text", "f: column delta_text: encoding DELTA_LENGTH_BYTE_ARRAY is not read"},
      {"split", "f: column split: encoding BYTE_STREAM_SPLIT is not read"},
      {"brotli", "f: column brotli: compression BROTLI is not read"},
      {"lz4", "f: column lz4: compression LZ4_RAW is not read"},
      {"text", "f: no column \"text\"; there are binary, fixed, date"},
  };
  for (const auto& [name, message] : cases) EXPECT_THAT(fault(file, {name}), HasSubstr(message));
  EXPECT_EQ(fault(file, {"good"}), "");
  EXPECT_THAT(fault(file), HasSubstr("is not read"));
}

TEST(ParquetReader, ChecksumsAreChecked) {
  std::string file = read_file(golden("none-v2-plain.parquet"));
  const size_t at = file.find("floats on water");
  ASSERT_NE(at, std::string::npos);
  file[at] = 'g';
  EXPECT_THAT(fault(file), HasSubstr("column text: a damaged page (its checksum does not match)"));
}

TEST(ParquetReader, TextIsUtf8) {
  std::string file = read_file(golden("snappy-v1-plain.parquet"));
  const size_t at = file.find("floats on water");
  ASSERT_NE(at, std::string::npos);
  file[at] = '\xFF';
  EXPECT_THAT(fault(file), HasSubstr("f: column text: a text that is not UTF-8"));
}

TEST(ParquetReader, FilesThatAreNoParquet) {
  EXPECT_THAT(fault(""), HasSubstr("f is not a Parquet file"));
  EXPECT_THAT(fault("PAR1"), HasSubstr("f is not a Parquet file"));
  EXPECT_THAT(fault("{\"text\": \"not at all\"}\n"), HasSubstr("f is not a Parquet file"));
  EXPECT_THAT(fault("PAR1....PARE"), HasSubstr("encrypted"));
  const std::string size_of_4_gib = "PAR1\xff\xff\xff\xffPAR1";
  EXPECT_THAT(fault(size_of_4_gib), HasSubstr("metadata of 4294967295 bytes in a file of 12"));
  EXPECT_THROW(ParquetReader(golden("missing.parquet")), InputError);
}

}  // namespace
}  // namespace twell
