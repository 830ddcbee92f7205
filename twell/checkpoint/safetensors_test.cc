// SPDX-License-Identifier: Apache-2.0
#include "twell/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::string file_text(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header +
         std::string(data_bytes, '\1');
}

// Parses a heap block of exactly the file's size, so that a sanitizer detects any read beyond it.
SafetensorsContent parse(const std::string& file) {
  const std::vector<char> exact(file.begin(), file.end());
  SafetensorsContent content = parse_safetensors(std::as_bytes(std::span(exact)), "x.safetensors");
  for (auto& [name, info] : content.tensors) info.bytes = {};  // must not outlive the block
  return content;
}

std::string refusal(const std::string& file) {
  try {
    parse(file);
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("x.safetensors: "));
    return error.what();
  }
  return "";
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

TEST(Safetensors, ReadsAHeader) {
  const SafetensorsContent content = parse(
      file_text("{\"__metadata__\":{\"a\":\"b\"}," + tensor("y", "F32", "[2,1]", "[6,14]") + "," +
                    tensor("x", "U16", "[3]", "[0,6]") + "," + tensor("s", "F64", "[]", "[14,22]") +
                    "," + tensor("none", "F32", "[0,5]", "[6,6]") + "}   ",
                22));
  EXPECT_EQ(content.tensors.size(), 4u);
  EXPECT_EQ(content.tensors.at("y").shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(content.tensors.at("x").dtype, "U16");
  EXPECT_EQ(content.metadata.at("a"), "b");
}

// Of four times as many tensors the time must be far from sixteen times: reading and writing
// headers, and taking tensors out of an index.
TEST(Safetensors, TakesNearlyLinearTimeForManyTensors) {
  const auto best_of = [](const std::function<void()>& run) {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const std::clock_t begin = std::clock();
      run();
      best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    }
    return best;
  };
  const TempFolder folder;
  const auto seconds = [&](int64_t count) {
    std::string header = "{", index = "{\"weight_map\":{";
    std::vector<TensorToWrite> tensors;
    std::vector<std::string> removed;
    for (int64_t i = 0; i < count; ++i) {
      const std::string name = fmt::format("tensor.{}", i);
      header += (i > 0 ? "," : "") + tensor(name, "F32", "[0]", "[0,0]");
      index += fmt::format("{}\"{}\":\"a.safetensors\"", i > 0 ? "," : "", name);
      tensors.push_back({name, "F32", {0}, [](const auto&) {}});
      if (i % 2 == 0) removed.push_back(name);
    }
    const std::string file = file_text(header + "}", 0);
    index += "}}";
    return std::array{
        best_of([&] { EXPECT_EQ(std::ssize(parse(file).tensors), count); }),
        best_of([&] { write_safetensors(folder.path() / "many.safetensors", tensors, {}); }),
        best_of([&] { EXPECT_EQ(std::ssize(parse_shard_index(index, "index")), count); }),
        best_of([&] { rewrite_shard_index(index, removed, 1); })};
  };
  const auto few = seconds(1'500), many = seconds(6'000);
  for (size_t i = 0; i < few.size(); ++i) {
    EXPECT_LT(many[i], 10 * few[i] + 0.02) << i << ": " << few[i] << " s, " << many[i] << " s";
  }
}

TEST(Safetensors, RefusesBadFrames) {
  EXPECT_THAT(refusal("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"),
              HasSubstr("it is a Git LFS pointer"));
  EXPECT_THAT(refusal(""), HasSubstr("0 bytes are too few"));
  EXPECT_THAT(refusal("1234567"), HasSubstr("too few"));
  EXPECT_THAT(refusal(std::string(8, '\xff')), HasSubstr("truncated"));
  EXPECT_THAT(refusal(file_text("{}", 0).substr(0, 9)), HasSubstr("truncated"));
  EXPECT_THAT(refusal(file_text("", 4)), HasSubstr("does not start with"));
  EXPECT_THAT(refusal(file_text(" {}", 0)), HasSubstr("does not start with"));
  EXPECT_THAT(refusal(file_text("{\"a\"", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal(file_text("{\"a\":\"\xff\"}", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal(file_text("{}{}", 0)), HasSubstr("not valid JSON"));
}

TEST(Safetensors, RefusesBadEntries) {
  const auto refused = [](const std::string& entries, size_t bytes = 8) {
    return refusal(file_text("{" + entries + "}", bytes));
  };
  EXPECT_THAT(refused("\"x\":3"), HasSubstr("tensor x: must have dtype"));
  EXPECT_THAT(refused(R"("x":{"dtype":"F32","shape":[2]})"), HasSubstr("must have dtype"));
  EXPECT_THAT(refused(tensor("x", "F31", "[2]", "[0,8]")), HasSubstr("dtype \"F31\""));
  EXPECT_THAT(refused(tensor("x", "F32", "[-2]", "[0,8]")), HasSubstr("shape"));
  EXPECT_THAT(refused(tensor("x", "F32", "[2.0]", "[0,8]")), HasSubstr("shape"));
  EXPECT_THAT(refused(tensor("x", "F32", "2", "[0,8]")), HasSubstr("shape"));
  EXPECT_THAT(refused(tensor("x", "F32", "[4294967296,4294967296]", "[0,8]")),
              HasSubstr("too large"));
  EXPECT_THAT(refused(tensor("x", "F32", "[18446744073709551615]", "[0,8]")), HasSubstr("shape"));
  EXPECT_THAT(refused(tensor("x", "F32", "[2]", "[8,0]")), HasSubstr("[begin, end]"));
  EXPECT_THAT(refused(tensor("x", "F32", "[2]", "[0,8,8]")), HasSubstr("[begin, end]"));
  EXPECT_THAT(refused(tensor("x", "F32", "[2]", "[-8,0]")), HasSubstr("[begin, end]"));
  EXPECT_THAT(refused(tensor("x", "F32", "[3]", "[0,8]")), HasSubstr("takes 12 bytes"));
  EXPECT_THAT(refused(tensor("x", "F32", "[3]", "[0,12]")), HasSubstr("it is truncated"));
  EXPECT_THAT(refused("\"__metadata__\":{\"a\":1}", 0), HasSubstr("must be a string"));
  EXPECT_THAT(refused("\"__metadata__\":[]", 0), HasSubstr("must be an object"));
  EXPECT_THAT(refused("\"a\":[[[[1]]]]"), HasSubstr("nested"));
}

TEST(Safetensors, RefusesOverlapsHolesAndDuplicates) {
  const auto refused = [](const std::string& a, const std::string& b) {
    return refusal(file_text("{" + a + "," + b + "}", 8));
  };
  const std::string first = tensor("a", "U8", "[4]", "[0,4]");
  EXPECT_THAT(refused(first, tensor("b", "U8", "[5]", "[3,8]")), HasSubstr("overlaps"));
  EXPECT_THAT(refused(first, tensor("b", "U8", "[4]", "[0,4]")), HasSubstr("overlaps"));
  EXPECT_THAT(refused(first, tensor("b", "U8", "[3]", "[5,8]")), HasSubstr("1 unused bytes"));
  EXPECT_THAT(refused(first, tensor("b", "U8", "[3]", "[4,7]")), HasSubstr("after the last"));
  EXPECT_THAT(refused(first, tensor("a", "U8", "[4]", "[4,8]")), HasSubstr("appears twice"));
}

class SafetensorsFileTest : public ::testing::Test {
 protected:
  void write(const std::map<std::string, std::string>& metadata = {{"note", "hello"}}) const {
    const auto bytes_of = [](const std::string& text, size_t piece) {
      return [text, piece](const auto& sink) {
        const auto bytes = std::as_bytes(std::span(text));
        for (size_t i = 0; i < bytes.size(); i += piece) {
          sink(bytes.subspan(i, std::min(piece, bytes.size() - i)));
        }
      };
    };
    const std::vector<TensorToWrite> tensors = {{"z", "U8", {3}, bytes_of("abc", 2)},
                                                {"nothing", "F32", {0}, bytes_of("", 1)},
                                                {"also nothing", "F32", {0}, bytes_of("", 1)},
                                                {"a", "U16", {2, 1}, bytes_of("wxyz", 3)}};
    write_safetensors(path_, tensors, metadata);
  }

  // Writes without the sync of an atomic write, which would dominate the test's time.
  void overwrite(const std::string& text) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << text;
  }

  const TempFolder temp_;
  const fs::path folder_ = temp_.path(), path_ = folder_ / "t.safetensors";
};

// So that mapped values can be used where they are, however long the names are.
TEST_F(SafetensorsFileTest, ValuesBeginAtAMultipleOf64Bytes) {
  for (size_t length = 0; length < 64; ++length) {
    write({{"note", std::string(length, 'n')}});
    const SafetensorsFile file(path_);
    const std::string text = read_file(path_);
    EXPECT_EQ((text.size() - 7) % 64, 0u) << length;  // behind them: seven bytes of values
    EXPECT_EQ(file.metadata().at("note").size(), length);
  }
}

TEST_F(SafetensorsFileTest, WritesWhatItReads) {
  write();
  const SafetensorsFile file(path_);
  file.verify_hash();
  EXPECT_EQ(file.tensors().size(), 4u);
  const TensorInfo& a = file.tensor("a");
  EXPECT_EQ(std::memcmp(a.bytes.data(), "wxyz", 4), 0);
  EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(file.metadata().at("note"), "hello");
  EXPECT_THROW(file.tensor("b"), InputError);
}

TEST_F(SafetensorsFileTest, EveryFlippedByteIsFoundOrHarmless) {
  write();
  const std::string good = read_file(path_);
  int found = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x04);
    overwrite(bad);
    try {
      const SafetensorsFile file(path_);
      file.verify_hash();
      // The name of the hash's own entry is the only part that the hash does not protect.
      EXPECT_FALSE(file.metadata().contains("content_hash")) << "byte " << i;
      EXPECT_EQ(file.metadata().at("note"), "hello") << "byte " << i;
      EXPECT_EQ(std::memcmp(file.tensor("z").bytes.data(), "abc", 3), 0) << "byte " << i;
    } catch (const InputError&) {
      ++found;
    }
  }
  EXPECT_EQ(found, static_cast<int>(good.size() - strlen("content_hash")));
}

TEST_F(SafetensorsFileTest, EveryTruncationIsFound) {
  write();
  const std::string good = read_file(path_);
  for (size_t size = 0; size < good.size(); ++size) {
    overwrite(good.substr(0, size));
    EXPECT_THROW(SafetensorsFile{path_}, InputError) << size;
  }
}

TEST_F(SafetensorsFileTest, AcceptsFilesWithoutAHash) {
  overwrite(file_text("{" + tensor("x", "U8", "[4]", "[0,4]") + "}", 4));
  SafetensorsFile(path_).verify_hash();
}

TEST_F(SafetensorsFileTest, ATensorThatChangesBetweenThePassesLeavesNoFile) {
  int calls = 0;
  const TensorToWrite unsteady = {
      "x", "U8", {1}, [&](const auto& sink) { sink(std::as_bytes(std::span("ab", ++calls))); }};
  EXPECT_THROW(write_safetensors(path_, {&unsteady, 1}, {}), Error);
  EXPECT_TRUE(fs::is_empty(folder_));
}

}  // namespace
}  // namespace twell
