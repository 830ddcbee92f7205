// SPDX-License-Identifier: Apache-2.0
// Tests rows of files from pyarrow (tests/golden/make_parquet_golden.py), refusals of unsupported
// features, and damaged files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/parquet/reader.h"
#include "twell/parquet/thrift.h"

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

// The reader's error message for these bytes; empty when it reads them all.
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

TEST_P(ParquetFiles, AreReadByRowGroups) {
  const json expected = json::parse(read_file(golden("rows.json")));
  const fs::path path = golden(std::string(GetParam()) + ".parquet");
  const std::vector<int64_t> bytes = ParquetReader(path).row_group_bytes();
  ASSERT_EQ(bytes.size(), 3u);  // of 17, 17 and 6 rows
  for (size_t first = 0; first <= 3; ++first) {
    for (size_t end = first; end <= 4; ++end) {
      ParquetReader reader(path, {"small"}, {first, end});
      const size_t last_row = std::min<size_t>(17 * end, 40);
      EXPECT_EQ(reader.file_bytes_read(), 0);
      json row;
      for (size_t i = 17 * first; i < last_row; ++i) {
        ASSERT_TRUE(reader.next(row));
        ASSERT_EQ(row["small"], expected[i]["small"]);
        ASSERT_EQ(reader.row(), static_cast<int64_t>(i) + 1);
      }
      EXPECT_FALSE(reader.next(row));
      int64_t stored = 0;
      for (size_t g = first; g < std::min<size_t>(end, 3); ++g) stored += bytes[g];
      EXPECT_EQ(reader.file_bytes_read(), stored);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, ParquetFiles,
                         testing::Values("none-v1-dictionary", "none-v2-plain", "snappy-v1-plain",
                                         "snappy-v2-dictionary", "gzip-v1-dictionary",
                                         "gzip-v2-plain", "zstd-v1-plain", "zstd-v2-dictionary"));

// As pyarrow reads them (tests/golden/make_parquet_writers_golden.py).
TEST(ParquetReader, ReadsFilesOfOtherWriters) {
  const json expected = json::parse(read_file(golden("writers/rows.json")));
  EXPECT_GE(expected.size(), 13u);
  for (const auto& [name, rows] : expected.items()) {
    ParquetReader reader(golden("writers/" + name + ".parquet"));
    EXPECT_EQ(read_all(reader), rows) << name;
  }
}

TEST(ParquetReader, RefusesByName) {
  const std::string file = read_file(golden("refused.parquet"));
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"binary", "f: column binary: BYTE_ARRAY without UTF8 is not read"},
      {"fixed", "f: column fixed: FIXED_LEN_BYTE_ARRAY is not read"},
      {"date", "f: column date: DATE is not read"},
      {"time", "f: column time: TIMESTAMP is not read"},
      {"decimal", "f: column decimal: DECIMAL is not read"},
      {"map", "f: column map: MAP is not read"},
      {"delta", "f: row group 1: column delta: encoding DELTA_BINARY_PACKED is not read"},
      {"delta_text",
       "f: row group 1: column delta_text: encoding DELTA_LENGTH_BYTE_ARRAY is not read"},
      {"split", "f: row group 1: column split: encoding BYTE_STREAM_SPLIT is not read"},
      {"brotli", "f: row group 1: column brotli: compression BROTLI is not read"},
      {"lz4", "f: row group 1: column lz4: compression LZ4_RAW is not read"},
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
  EXPECT_THAT(fault(file), HasSubstr("f: row group 1: column text: a text that is not UTF-8"));
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

// A writer for Thrift's compact protocol, limited to what the files below need.
std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
// A field of a struct: a number, written as i64, or an encoded value with its type.
struct Field {
  int id;
  int type;
  std::string bytes;
};
Field number(int id, int64_t value) { return {id, 6, varint(static_cast<uint64_t>(value) << 1)}; }
Field binary(int id, const std::string& text) { return {id, 8, varint(text.size()) + text}; }
std::string structure(const std::vector<Field>& fields) {
  std::string out;
  int last = 0;
  for (const Field& field : fields) {
    out += static_cast<char>((field.id - last) << 4 | field.type);
    out += field.bytes;
    last = field.id;
  }
  return out + '\0';
}
Field nested(int id, const std::vector<Field>& fields) { return {id, 12, structure(fields)}; }
Field list(int id, const std::vector<std::string>& structures) {
  std::string out(1, static_cast<char>(structures.size() << 4 | 12));
  for (const std::string& one : structures) out += one;
  return {id, 9, out};
}

// A file with a required column of `type` whose chunk holds only a dictionary: `values` values in
// `bytes` bytes that `codec` has packed.
std::string file_of_dictionary(int32_t type, int64_t values, int64_t bytes, int64_t entries,
                               int64_t codec, const std::string& packed,
                               int64_t dictionary_offset = 0) {
  const std::string page =
      structure({number(1, 2), number(2, bytes), number(3, static_cast<int64_t>(packed.size())),
                 nested(7, {number(1, values), number(2, 0)})}) +
      packed;
  const std::string chunk =
      structure({nested(3, {number(1, type), number(4, codec), number(5, entries),
                            number(7, static_cast<int64_t>(page.size())), number(9, 4),
                            number(11, dictionary_offset)})});
  const std::string metadata = structure(
      {list(2, {structure({binary(4, "root"), number(5, 1)}),
                structure({number(1, type), number(3, 0), binary(4, "a"), number(6, 0)})}),
       number(3, entries), list(4, {structure({list(1, {chunk}), number(3, entries)})})});
  std::string size(4, '\0');
  for (int i = 0; i < 4; ++i)
    size[static_cast<size_t>(i)] = static_cast<char>(metadata.size() >> 8 * i);
  return "PAR1" + page + metadata + size + "PAR1";
}

// A file whose dictionary and values are zeros.
std::string file_of_dictionary(int32_t type, int64_t values, int64_t bytes, int64_t entries) {
  const std::string zeros(static_cast<size_t>(bytes), '\0');
  std::string packed(ZSTD_compressBound(zeros.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), zeros.data(), zeros.size(), 1));
  return file_of_dictionary(type, values, bytes, entries, 6, packed);
}

TEST(ParquetReader, DictionariesAreBoundedByTheirBytes) {
  EXPECT_THAT(fault(file_of_dictionary(kParquetByteArray, 10, 40, 10)),
              HasSubstr("10 values are missing"))
      << "a dictionary that makes sense";
  EXPECT_THAT(fault(file_of_dictionary(kParquetByteArray, int64_t{1} << 20, 1 << 22, 10)),
              HasSubstr("10 values are missing"))
      << "a writer's whole dictionary";
  EXPECT_THAT(fault(file_of_dictionary(kParquetInt64, 10, 40, 10)), HasSubstr("values end early"));
  EXPECT_THAT(fault(file_of_dictionary(kParquetByteArray, 10, 39, 10)),
              HasSubstr("a dictionary of 10 values in 39 bytes"));
}

// Hadoop's writers make such pages: one gzip member after another.
TEST(ParquetReader, GzipPagesMayHaveSeveralMembers) {
  const auto gzip = [](std::string bytes) {
    std::string packed(200, '\0');
    z_stream stream{};
    EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    stream.next_in = reinterpret_cast<Bytef*>(bytes.data());
    stream.avail_in = static_cast<uInt>(bytes.size());
    stream.next_out = reinterpret_cast<Bytef*>(packed.data());
    stream.avail_out = static_cast<uInt>(packed.size());
    EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
    packed.resize(packed.size() - stream.avail_out);
    deflateEnd(&stream);
    return packed;
  };
  const auto file_of = [](const std::string& packed) {
    return file_of_dictionary(kParquetByteArray, 10, 40, 10, 2, packed);
  };
  EXPECT_THAT(fault(file_of(gzip(std::string(40, '\0')))), HasSubstr("10 values are missing"));
  const std::string two = gzip(std::string(24, '\0')) + gzip(std::string(15, '\0'));
  EXPECT_THAT(fault(file_of(two + gzip(std::string(1, '\0')))), HasSubstr("10 values are missing"));
  EXPECT_THAT(fault(file_of(two)), HasSubstr("do not decompress to 40"));
}

// A place of the dictionary that is not in front of the data is none.
TEST(ParquetReader, ColumnsBeginWithTheirFirstPage) {
  const std::string zeros(40, '\0');
  for (const int64_t offset : {-1, 0, 4, 5, 1 << 20}) {
    EXPECT_THAT(fault(file_of_dictionary(kParquetByteArray, 10, 40, 10, 0, zeros, offset)),
                HasSubstr("10 values are missing"))
        << offset;
  }
}

// Row groups of no rows, whose columns may have no pages and any offsets.
TEST(ParquetReader, GroupsOfNoRowsHaveNoPages) {
  const auto file_of = [](int64_t values) {
    const std::string chunk =
        structure({nested(3, {number(1, kParquetInt64), number(4, 0), number(5, values),
                              number(7, 0), number(9, 0)})});
    const std::string metadata =
        structure({list(2, {structure({binary(4, "root"), number(5, 1)}),
                            structure({number(1, kParquetInt64), number(3, 0), binary(4, "a")})}),
                   number(3, 0), list(4, {structure({list(1, {chunk}), number(3, 0)})})});
    std::string size(4, '\0');
    size[0] = static_cast<char>(metadata.size());
    return "PAR1" + metadata + size + "PAR1";
  };
  EXPECT_EQ(fault(file_of(0)), "");
  EXPECT_THAT(fault(file_of(1)), HasSubstr("row group 1: damaged: 1 values of no rows"));
}

// Thrift's compact protocol: every form of an empty list and map, and every type to be skipped.
TEST(Thrift, ReadsEveryFormOfTheCompactProtocol) {
  const auto skipped = [](const std::string& fields) -> std::string {
    const std::string bytes = fields + '\0', source = "f";
    ThriftReader in(std::as_bytes(std::span(bytes)), source);
    std::string ids;
    try {
      in.fields([&](int32_t id, ThriftType type) {
        ids += fmt::format("{} ", id);
        in.skip(type);
      });
    } catch (const InputError& error) {
      return error.what();
    }
    EXPECT_EQ(in.position(), bytes.size());
    return ids;
  };
  const auto bytes = [](std::initializer_list<int> values) {
    std::string out;
    for (const int value : values) out += static_cast<char>(value);
    return out;
  };
  for (int element = 0; element < 16; ++element) {
    EXPECT_EQ(skipped(bytes({0x19, element})), "1 ") << element;             // short form
    EXPECT_EQ(skipped(bytes({0x19, 0xF0 | element, 0})), "1 ") << element;   // long form
    EXPECT_EQ(skipped(bytes({0x1A, element, 0x15, 2})), "1 2 ") << element;  // a set, then a number
  }
  EXPECT_EQ(skipped(bytes({0x1B, 0})), "1 ");              // an empty map has no types
  EXPECT_EQ(skipped(bytes({0x1B, 1, 0x51, 2, 1})), "1 ");  // i32 to boolean
  EXPECT_EQ(skipped(bytes({0x19, 0x21, 1, 2, 0x11})),
            "1 2 ");  // booleans, in a list and as a field
  EXPECT_EQ(skipped(bytes({0x19, 0xF3, 1, 7, 0x12})), "1 2 ");     // one byte, in the long form
  EXPECT_EQ(skipped(bytes({0x09, 0x0C, 0})), "6 ");                // the id after the type
  EXPECT_EQ(skipped(bytes({0x1D}) + std::string(16, 'u')), "1 ");  // UUID
  EXPECT_EQ(skipped(bytes({0x19, 0x1D}) + std::string(16, 'u')), "1 ");
  EXPECT_EQ(skipped(bytes({0x19, 0x17}) + std::string(8, 'd')), "1 ");  // doubles
  EXPECT_THAT(skipped(bytes({0x19, 0x10})), HasSubstr("an unknown type"));
  EXPECT_THAT(skipped(bytes({0x19, 0x1E, 0, 0})), HasSubstr("an unknown type"));
  EXPECT_THAT(skipped(bytes({0x1E})), HasSubstr("an unknown type"));
  EXPECT_THAT(skipped(bytes({0x19, 0x43, 0})), HasSubstr("a list longer than the data"));
}

TEST(ParquetReader, PagesHeldAtOnceAreBounded) {
  ParquetMemory memory;
  memory.take(size_t{1} << 29, "f: column a");
  memory.take(size_t{1} << 29, "f: column b");
  EXPECT_THROW(memory.take(1, "f: column c"), InputError);
  memory.give_back(size_t{1} << 29);
  memory.take(1, "f: column c");
  EXPECT_THROW(memory.take(std::numeric_limits<size_t>::max(), "f: column d"), InputError);
}

}  // namespace
}  // namespace twell
