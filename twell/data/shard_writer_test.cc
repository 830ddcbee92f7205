// SPDX-License-Identifier: Apache-2.0
// Shards made of many files in parts: threads, interruptions, and what has changed in between.
#include "twell/data/shard_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/data/shards.h"
#include "twell/data/test_files.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

fs::path golden(const std::string& name) {
  return fs::path(TWELL_SOURCE_DIR) / "tests/golden/parquet" / name;
}

std::string json_lines(int first, int count) {
  std::string lines;
  for (int i = first; i < first + count; ++i) {
    lines += fmt::format("{{\"needed\": \"line {} of {}\"}}\n", i, std::string(i % 40, 'x'));
  }
  return lines;
}

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) {
      files[fs::relative(entry.path(), folder).string()] = read_file(entry.path());
    }
  }
  return files;
}

class ShardWriting : public ::testing::Test {
 protected:
  ShardWriting() {
    for (int i = 0; i < 6; ++i) {
      folder_.write(fmt::format("data/{}.jsonl", i), json_lines(100 * i, 100));
    }
    fs::copy_file(golden("none-v2-plain.parquet"), data_ / "3a.parquet");
    folder_.write("data/4a.jsonl.zst", zst(json_lines(1000, 50)));
    folder_.write("data/4b.txt", "one text\nof two lines");
  }

  // One token per byte. Fails at the text `fail_at`, counted from 1.
  TokenEncoder encoder(int fail_at = 0) {
    encoded_ = 0;
    return {.encode =
                [this, fail_at](std::string_view text, std::vector<int32_t>& ids) {
                  if (++encoded_ == fail_at) throw Error("killed");
                  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
                },
            .token_bytes = [](int32_t) { return 1; },
            .eos = 256,
            .vocab_size = 257,
            .hash = "bytes"};
  }
  TextSourceOptions text(BadFile bad_file = BadFile::kError) const {
    return {.paths = {data_}, .json_field = "needed", .bad_file = bad_file};
  }
  // Refuses what has changed; returns the message of the fault, or an empty string.
  std::string write(const std::string& name, const TokenizeOptions& options, int fail_at = 0,
                    BadFile bad_file = BadFile::kError) {
    TextSource source(text(bad_file));
    try {
      ShardWriter writer(source, "bytes", folder_.path() / name, options, /*replace=*/false);
      writer.write(encoder(fail_at));
      skipped_ = writer.skipped();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  std::map<std::string, std::string> shards(const std::string& name) const {
    return contents(folder_.path() / name);
  }
  size_t finished(const std::string& name) const {
    size_t records = 0;
    for (const auto& [file, text] : shards(name + ".partial")) records += file.starts_with("parts");
    return records;
  }
  std::vector<int32_t> ids(const std::string& name, Split split) const {
    const ShardSet set(folder_.path() / name, "bytes", 257);
    set.verify();
    std::vector<int32_t> all(static_cast<size_t>(set.tokens(split)));
    set.read(split, 0, all);
    return all;
  }

  TempFolder folder_;
  fs::path data_ = folder_.path() / "data";
  std::atomic<int> encoded_ = 0;
  TextSkips skipped_;
};

// Every file is a part of its own; the Parquet file, cut at its row groups, is three.
const TokenizeOptions kSmallParts{.validation_fraction = 0.2, .part_bytes = 2000, .threads = 1};

TEST_F(ShardWriting, DoesNotDependOnThreads) {
  ASSERT_EQ(write("one", kSmallParts), "");
  EXPECT_GT(shards("one").size(), 15u);  // train and validation of most of ten parts
  for (const int threads : {2, 4}) {
    TokenizeOptions options = kSmallParts;
    options.threads = threads;
    ASSERT_EQ(write(fmt::format("{}", threads), options), "");
    EXPECT_EQ(shards(fmt::format("{}", threads)), shards("one"));
  }
  // Nor do the streams of ids depend on the parts.
  TokenizeOptions large = kSmallParts;
  large.part_bytes = int64_t{1} << 30;
  ASSERT_EQ(write("large", large), "");
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    EXPECT_EQ(ids("large", split), ids("one", split));
  }
}

TEST_F(ShardWriting, SeveralThreadsShareAPart) {
  // Some six batches of text, whose encoding takes differently long.
  std::string lines;
  for (int i = 0; lines.size() < size_t{3} << 20; ++i) {
    const std::string words(static_cast<size_t>(i * 7919 % 30000), static_cast<char>('a' + i % 26));
    lines += fmt::format("{{\"needed\": \"{} {}\"}}\n", i, words);
  }
  folder_.write("data/2a.jsonl.zst", zst(lines));
  TokenizeOptions options = kSmallParts;
  options.shard_tokens = 1'000'000;
  ASSERT_EQ(write("one", options), "");
  options.threads = 6;
  ASSERT_EQ(write("shared", options), "");
  EXPECT_EQ(shards("shared"), shards("one"));
  EXPECT_EQ(write("stopped", options, 500), "killed");
}

TEST_F(ShardWriting, GoesOnWhereItWasInterrupted) {
  ASSERT_EQ(write("whole", kSmallParts), "");
  const int texts = encoded_;
  int begun = 0;
  for (const int fail_at : {250, 150, 160}) {  // of the texts of unfinished parts
    EXPECT_EQ(write("shards", kSmallParts, fail_at), "killed");
    EXPECT_FALSE(fs::exists(folder_.path() / "shards"));
    EXPECT_GE(finished("shards"), 2u);
    begun += encoded_;
  }
  // What a killed process leaves behind is removed.
  folder_.write("shards.partial/.train-00009-000.bin.tmp.1234567", "left");
  folder_.write("shards.partial/train-00010-000.bin", "no record names it");
  folder_.write("shards.partial/parts/00010.json", "{\"cut");
  TokenizeOptions other_threads = kSmallParts;
  other_threads.threads = 3;
  TokenizeProgress last;
  other_threads.progress = [&](const TokenizeProgress& now) { last = now; };
  ASSERT_EQ(write("shards", other_threads), "");
  EXPECT_GT(last.kept_bytes, 0);
  EXPECT_EQ(last.bytes_read, last.total_bytes);
  EXPECT_EQ(last.parts_finished, last.parts);
  EXPECT_EQ(last.tokens, std::ssize(ids("shards", Split::kTrain)) +
                             std::ssize(ids("shards", Split::kValidation)));
  EXPECT_LT(encoded_, texts - 400);
  EXPECT_LT(begun + encoded_, texts + 300);  // up to a part was made again each time
  EXPECT_EQ(shards("shards"), shards("whole"));
  EXPECT_FALSE(fs::exists(folder_.path() / "shards.partial"));
}

// Records that could not have been written by an interrupted job count as none.
TEST_F(ShardWriting, DeeplyNestedRecordsAreDamaged) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  ASSERT_EQ(write("whole", kSmallParts), "");
  ASSERT_EQ(write("shards", kSmallParts, 250), "killed");
  folder_.write("shards.partial/parts/00000.json",
                R"({"number": 0, "inputs": ["x"], "units_skipped": 0, "shards": )" + deep + "}");
  EXPECT_EQ(write("shards", kSmallParts, 250), "killed");
  folder_.write("shards.partial/source.json", R"({"options": {"seed": )" + deep + "}}");
  EXPECT_EQ(write("shards", kSmallParts), "");
  EXPECT_EQ(shards("shards"), shards("whole"));
}

// All parts are finished, and then altered before their tail moves to the other split.
TEST_F(ShardWriting, AlteredPartsAreRefused) {
  const TokenizeOptions options{.validation_fraction = 0.0003, .part_bytes = 2000, .threads = 1};
  const auto write_with = [&](const TokenEncoder& with) -> std::string {
    TextSource source(text());
    try {
      ShardWriter(source, "bytes", folder_.path() / "shards", options, /*replace=*/false)
          .write(with);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  TokenEncoder interrupted = encoder();
  interrupted.token_bytes = [](int32_t) -> int64_t { throw Error("killed"); };
  EXPECT_EQ(write_with(interrupted), "killed");
  for (const char byte : {'\xff', '\x01'}) {  // ids of 65535, and of 257
    for (const auto& [file, bytes] : shards("shards.partial")) {
      if (!file.ends_with(".bin")) continue;
      folder_.write("shards.partial/" + file, std::string(bytes.size(), byte));
    }
    EXPECT_THAT(write_with(encoder()),
                AllOf(HasSubstr("outside the vocabulary of 257"), HasSubstr("to begin again")));
  }
}

TEST_F(ShardWriting, NothingIsKeptOfNoFinishedPart) {
  EXPECT_EQ(write("shards", kSmallParts, 1), "killed");
  EXPECT_FALSE(fs::exists(folder_.path() / "shards.partial"));
}

TEST_F(ShardWriting, RefusesOtherOptions) {
  ASSERT_EQ(write("shards", kSmallParts, 300), "killed");
  const auto before = shards("shards.partial");
  TokenizeOptions other = kSmallParts;
  other.validation_fraction = 0.1;
  EXPECT_THAT(write("shards", other), AllOf(HasSubstr("validation_fraction was 0.2, now 0.1"),
                                            HasSubstr("shards.partial")));
  other = kSmallParts;
  other.part_bytes = 4000;
  EXPECT_THAT(write("shards", other), HasSubstr("part_bytes was 2000, now 4000"));
  EXPECT_EQ(shards("shards.partial"), before);
  EXPECT_EQ(write("shards", kSmallParts), "");
}

TEST_F(ShardWriting, RefusesChangedInputsOfFinishedParts) {
  ASSERT_EQ(write("shards", kSmallParts, 350), "killed");
  ASSERT_EQ(finished("shards"), 3u);
  const fs::path file = data_ / "1.jsonl";
  const auto time = fs::last_write_time(file);
  const std::string text = read_file(file);
  fs::rename(file, folder_.path() / "away");
  EXPECT_THAT(write("shards", kSmallParts),
              AllOf(HasSubstr("1.jsonl, which is no longer there"), HasSubstr("--changed-files")));
  folder_.write("data/1.jsonl", text + json_lines(7, 1));
  fs::last_write_time(file, time);
  EXPECT_THAT(write("shards", kSmallParts), HasSubstr("1.jsonl, which has changed since"));
  fs::remove(file);
  fs::rename(folder_.path() / "away", file);
  fs::last_write_time(file, time + std::chrono::seconds(1));
  EXPECT_THAT(write("shards", kSmallParts), HasSubstr("1.jsonl, which has changed since"));
  TokenizeOptions redo = kSmallParts;
  redo.redo_changed = true;
  EXPECT_EQ(write("shards", redo, 220), "killed");  // after that part and the next two
  EXPECT_EQ(finished("shards"), 5u);

  // Files that no finished part was made from may change, and others may come in between.
  folder_.write("data/5.jsonl", json_lines(3, 200));
  folder_.write("data/0a.jsonl", json_lines(5000, 10));
  ASSERT_EQ(write("shards", kSmallParts), "");
  ASSERT_EQ(write("whole", kSmallParts), "");
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    EXPECT_EQ(ids("shards", split), ids("whole", split));
  }
}

TEST_F(ShardWriting, NamesTheRowGroupOfADamagedFileAndKeepsTheRest) {
  const fs::path file = data_ / "3a.parquet";
  const std::string good = read_file(file);
  // The second row group holds these words twice in the column "text", then in "needed".
  size_t at = static_cast<size_t>(ParquetReader(file).row_group_bytes()[0]);
  for (int i = 0; i < 3; ++i) at = good.find("floats on water", at + 1);
  ASSERT_NE(at, std::string::npos);
  std::string bad = good;
  bad[at] = 'g';
  folder_.write("data/3a.parquet", bad);
  EXPECT_THAT(write("shards", kSmallParts),
              AllOf(HasSubstr("3a.parquet: row group 2: column needed"), HasSubstr("checksum")));
  EXPECT_EQ(finished("shards"), 5u);  // four files and the first row group
  // Leaving the damaged row group out is possible,
  EXPECT_EQ(write("skipped", kSmallParts, 0, BadFile::kSkip), "");
  EXPECT_EQ(skipped_, (TextSkips{.files = 1}));
  // and so is going on with a good copy of the file.
  folder_.write("data/3a.parquet", good);
  fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1));
  EXPECT_THAT(write("shards", kSmallParts), HasSubstr("3a.parquet, which has changed since"));
  TokenizeOptions redo = kSmallParts;
  redo.redo_changed = true;
  EXPECT_EQ(write("shards", redo), "");
  ASSERT_EQ(write("whole", kSmallParts), "");
  EXPECT_EQ(shards("shards"), shards("whole"));
}

TEST_F(ShardWriting, MakesPartsWithGapsAgainWhereGapsAreFaults) {
  folder_.write("data/1.jsonl", json_lines(0, 20) + "not JSON\n");
  EXPECT_EQ(write("shards", kSmallParts, 250, BadFile::kSkip), "killed");
  EXPECT_THAT(write("shards", kSmallParts),
              AllOf(HasSubstr("1.jsonl"), HasSubstr("line 21: not valid JSON")));
  EXPECT_EQ(write("shards", kSmallParts, 0, BadFile::kSkip), "");
  EXPECT_EQ(skipped_, (TextSkips{.rows = 1}));
}

TEST_F(ShardWriting, MakesPartsOfBadFilesAgainWhereTheyAreFaults) {
  folder_.write("data/1a.jsonl.gz", "no gzip");
  EXPECT_EQ(write("shards", kSmallParts, 250, BadFile::kSkip), "killed");
  EXPECT_THAT(write("shards", kSmallParts), HasSubstr("1a.jsonl.gz"));
  EXPECT_EQ(write("shards", kSmallParts, 0, BadFile::kSkip), "");
  EXPECT_EQ(skipped_, (TextSkips{.files = 1}));
}

TEST_F(ShardWriting, TwoProcessesDoNotMakeTheSameShards) {
  TextSource source(text());
  const ShardWriter first(source, "bytes", folder_.path() / "shards", kSmallParts, false);
  EXPECT_THAT(write("shards", kSmallParts), HasSubstr("another process is making shards in"));
}

TEST_F(ShardWriting, KnowsItsOwnShards) {
  ASSERT_EQ(write("shards", kSmallParts), "");
  const auto made = [&](const TokenizeOptions& options) {
    TextSource source(text());
    return ShardWriter::made(source, "bytes", folder_.path() / "shards", options);
  };
  EXPECT_TRUE(made(kSmallParts));
  TokenizeOptions other = kSmallParts;
  other.threads = 2;
  EXPECT_TRUE(made(other));
  other.seed = 1;
  EXPECT_FALSE(made(other));
  folder_.write("data/6.jsonl", json_lines(0, 1));
  EXPECT_FALSE(made(kSmallParts));
}

TEST_F(ShardWriting, ShardsWithGapsAreNotThoseOfTheWholeText) {
  folder_.write("data/1.jsonl", json_lines(0, 20) + "{\"needed\": null}\n" + json_lines(20, 20));
  EXPECT_EQ(write("shards", kSmallParts, 0, BadFile::kSkip), "");
  EXPECT_EQ(skipped_, (TextSkips{.rows = 1}));
  const auto made = [&](BadFile bad_file) {
    TextSource source(text(bad_file));
    return ShardWriter::made(source, "bytes", folder_.path() / "shards", kSmallParts);
  };
  EXPECT_TRUE(made(BadFile::kSkip));
  EXPECT_FALSE(made(BadFile::kError));
}

// A part of several batches, the first of which take longest to encode.
TEST_F(ShardWriting, WritesTheBatchesOfAPartInOrder) {
  fs::remove_all(data_);
  folder_.write("data/a.jsonl", json_lines(0, 70'000));  // a batch has at most 16,384 documents
  const auto write_with = [&](const std::string& name, int threads) {
    TokenEncoder slow = encoder();
    slow.encode = [&, base = slow.encode](std::string_view text, std::vector<int32_t>& ids) {
      const int64_t number = encoded_;
      if (threads > 1 && number < 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
      base(text, ids);
    };
    TextSource source(text());
    ShardWriter(source, "bytes", folder_.path() / name,
                {.validation_fraction = 0.2, .threads = threads}, /*replace=*/false)
        .write(slow);
  };
  write_with("whole", 1);
  write_with("shards", 3);
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    EXPECT_EQ(ids("shards", split), ids("whole", split));
  }
}

// A tail of more ids than are moved at once.
TEST_F(ShardWriting, MovesALongTail) {
  fs::remove_all(data_);
  std::string document;
  for (int i = 0; document.size() < (size_t{3} << 20); ++i) document += fmt::format("{} ", i);
  folder_.write("data/a.txt", document);
  for (const int64_t shard_tokens : {int64_t{1} << 26, int64_t{700'000}}) {
    const std::string name = fmt::format("shards-{}", shard_tokens);
    ASSERT_EQ(write(name, {.validation_fraction = 0.5, .shard_tokens = shard_tokens}), "");
    const std::vector<int32_t> train = ids(name, Split::kTrain),
                               validation = ids(name, Split::kValidation);
    EXPECT_EQ(validation.size(), (document.size() + 2) / 2);
    ASSERT_EQ(train.size() + validation.size(), document.size() + 1);
    // The document's hash decides which split had it and gave its tail away.
    const auto is_document = [&](std::vector<int32_t> all, const std::vector<int32_t>& tail) {
      all.insert(all.end(), tail.begin(), tail.end());
      return std::equal(document.begin(), document.end(), all.begin());
    };
    EXPECT_TRUE(is_document(train, validation) || is_document(validation, train));
  }
}

TEST(TextParts, CoverTheFilesInOrder) {
  const TempFolder folder;
  for (const char* name : {"a", "b", "c", "e"}) folder.write(name, std::string(600, 'x'));
  folder.write("d", std::string(5000, 'x'));
  fs::copy_file(golden("none-v2-plain.parquet"), folder.path() / "f.parquet");
  folder.write("g", "");
  const TextSource source({.paths = {folder.path()}, .json_field = "needed"});
  const auto parts = source.parts(1300);
  std::vector<std::string> names;
  int64_t bytes = 0;
  for (const auto& part : parts) {
    names.emplace_back();
    for (const TextUnit& unit : part) {
      names.back() += unit.file.path.filename().string();
      if (unit.row_groups != ParquetRowGroups{}) {
        names.back() += fmt::format("[{}, {})", unit.row_groups.first, unit.row_groups.end);
      }
      bytes += unit.bytes;
    }
  }
  EXPECT_THAT(names, ::testing::ElementsAre("ab", "c", "d", "e", "f.parquet[0, 1)",
                                            "f.parquet[1, 2)", "f.parquet[2, 3)", "g"));
  EXPECT_LE(bytes, source.total_bytes());
  EXPECT_EQ(source.parts(int64_t{1} << 20).size(), 1u);
  const TextSource limited({.paths = {folder.path()}, .json_field = "needed", .max_bytes = 100});
  EXPECT_EQ(limited.parts(1300).size(), 1u);
}

}  // namespace
}  // namespace twell
