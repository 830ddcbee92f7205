// SPDX-License-Identifier: Apache-2.0
#include "twell/data/decompress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <string>

#include "twell/base/rng.h"
#include "twell/data/test_files.h"

namespace twell {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string read_all(const std::filesystem::path& path, size_t chunk = 65536) {
  ByteReader reader(path);
  std::string text, part(chunk, '\0');
  while (const size_t count = reader.read(part)) text.append(part, 0, count);
  EXPECT_EQ(reader.read(part), 0u);  // reading again at the end still gives 0
  EXPECT_EQ(reader.file_bytes_read(), static_cast<int64_t>(std::filesystem::file_size(path)));
  return text;
}

std::string fault_of(const std::filesystem::path& path) {
  try {
    read_all(path);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no fault";
}

std::string some_text(size_t bytes) {
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) {
    text += fmt::format("line {} has {}\n", i, philox(1, 2, i)[0] % 1000);
  }
  return text;
}

struct Format {
  std::string ending;
  std::function<std::string(std::string_view)> compress;
};

class Decompress : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Decompress,
                         ::testing::Values(Format{".gz", gzip}, Format{".xz", xz},
                                           Format{".zst", zst}),
                         [](const auto& format) { return format.param.ending.substr(1); });

TEST_P(Decompress, ReadsBackInChunksOfAnySize) {
  const TempFolder folder;
  const std::string text = some_text(500000);  // decompresses to several file buffers
  const auto file = folder.write("a" + GetParam().ending, GetParam().compress(text));
  for (size_t chunk : {7, 1000, 4096, 1 << 20}) EXPECT_EQ(read_all(file, chunk), text);
  EXPECT_EQ(read_all(folder.write("empty" + GetParam().ending, GetParam().compress(""))), "");
}

TEST_P(Decompress, ReadsConcatenatedStreamsAsOne) {
  const TempFolder folder;
  const std::string a = some_text(1000), b = some_text(300000);
  const auto compress = GetParam().compress;
  const auto file =
      folder.write("a" + GetParam().ending, compress(a) + compress("") + compress(b) + compress(a));
  EXPECT_EQ(read_all(file), a + b + a);
  EXPECT_EQ(read_all(file, 1), a + b + a);
}

TEST_P(Decompress, RefusesATruncatedStreamAtEveryLength) {
  const TempFolder folder;
  const std::string packed = GetParam().compress(some_text(500));
  for (size_t size = 0; size < packed.size(); ++size) {
    const auto file = folder.write("cut" + GetParam().ending, packed.substr(0, size));
    ASSERT_THAT(fault_of(file), AllOf(HasSubstr("cut" + GetParam().ending), HasSubstr("truncated")))
        << size;
  }
}

TEST_P(Decompress, RefusesOtherBytes) {
  const TempFolder folder;
  const std::string ending = GetParam().ending, packed = GetParam().compress(some_text(3000));
  EXPECT_THAT(
      fault_of(folder.write("text" + ending, "This is plain text, not a stream.\n")),
      AllOf(HasSubstr("text" + ending), HasSubstr(ending == ".xz" ? "not an xz" : "corrupt")));
  EXPECT_THAT(fault_of(folder.write("tail" + ending, packed + "trailing garbage")),
              AllOf(HasSubstr("tail" + ending), HasSubstr("corrupt")));
  std::string altered = packed;
  altered[packed.size() / 2] = static_cast<char>(altered[packed.size() / 2] ^ 0x10);
  if (ending != ".zst") {  // without a checksum, the zstd library's default
    EXPECT_THAT(fault_of(folder.write("altered" + ending, altered)), HasSubstr("corrupt"));
  }
}

TEST(Gzip, PassesOverZeroPadding) {
  const TempFolder folder;
  const std::string packed = gzip("text"), zeros(1000, '\0');
  EXPECT_EQ(read_all(folder.write("a.gz", packed + zeros)), "text");
  EXPECT_EQ(read_all(folder.write("b.gz", packed + zeros + packed)), "texttext");
  EXPECT_THAT(fault_of(folder.write("c.gz", packed + zeros + "x")), HasSubstr("garbage"));
}

// An empty last block ends a frame whose header promises 24,920 bytes. libzstd refuses such a frame
// only where it decodes it in one call.
TEST(Zstd, WhatIsCorruptDoesNotDependOnTheSizeOfReads) {
  const TempFolder folder;
  const auto file = folder.write("a.zst", std::string("\x28\xB5\x2F\xFD\x60\x58\x60\x01\0\0", 10));
  EXPECT_EQ(read_all(file, 5), "");
  EXPECT_EQ(read_all(file, 65536), "");
}

TEST(ByteReader, ReadsPlainFilesAndRefusesOthers) {
  const TempFolder folder;
  const std::string text = some_text(300000);
  EXPECT_EQ(read_all(folder.write("a.txt", text), 999), text);
  EXPECT_EQ(read_all(folder.write("empty", "")), "");
  EXPECT_THAT(fault_of(folder.path() / "none"), HasSubstr("No such file"));
  EXPECT_THAT(fault_of(folder.path()), HasSubstr("not a regular file"));
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(fault_of(pipe), HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace twell
