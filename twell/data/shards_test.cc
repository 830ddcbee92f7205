// SPDX-License-Identifier: Apache-2.0
#include "twell/data/shards.h"
#include "twell/data/shard_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int32_t kEos = 256;

// One token per byte.
TokenEncoder byte_encoder(int64_t vocab_size = 257) {
  return {.encode =
              [](std::string_view text, std::vector<int32_t>& ids) {
                for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
              },
          .token_bytes = [](int32_t) { return 1; },
          .eos = kEos,
          .vocab_size = vocab_size,
          .hash = "bytes"};
}

std::string joined(const std::vector<std::string>& documents) {
  std::string text;
  for (const std::string& document : documents) text += document + '\0';
  return text;
}

std::vector<std::string> some_documents(int count, uint64_t seed = 1) {
  std::vector<std::string> documents;
  for (int i = 0; i < count; ++i) {
    const uint64_t length = 1 + uniform_below(seed, 0, static_cast<uint64_t>(i), 60);
    documents.push_back(fmt::format("document {} of {} letters: {}", i, length,
                                    std::string(length, static_cast<char>('a' + i % 26))));
  }
  return documents;
}

// A folder with a text, and the shards made from it.
class Shards : public ::testing::Test {
 protected:
  ShardCounts write(std::string_view text, const TokenizeOptions& options = {},
                    const TokenEncoder& encoder = byte_encoder(),
                    size_t piece_bytes = size_t{1} << 20) {
    TextSource source({.paths = {folder_.write("text", text)}, .piece_bytes = piece_bytes});
    return write_shards(source, encoder, path_, options);
  }
  ShardSet open(int64_t vocab_size = 257) const { return ShardSet(path_, "bytes", vocab_size); }

  static std::vector<int32_t> ids(const ShardSet& shards, Split split) {
    std::vector<int32_t> all(static_cast<size_t>(shards.tokens(split)));
    shards.read(split, 0, all);
    return all;
  }
  std::vector<std::string> documents(Split split) const {
    std::vector<std::string> all(1);
    for (const int32_t id : ids(open(), split)) {
      id == kEos ? all.emplace_back().clear() : all.back().push_back(static_cast<char>(id));
    }
    EXPECT_EQ(all.back(), "") << "the stream does not end with EOS";
    all.pop_back();
    return all;
  }

  std::string manifest() const { return read_file(path_ / "manifest.json"); }
  std::string fault_with_manifest(const std::string& text) const {
    folder_.write("shards/manifest.json", text);
    return fault();
  }
  std::string fault_with(const std::string& from, const std::string& to) const {
    const std::string before = manifest();
    const size_t at = before.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    const std::string what = fault_with_manifest(std::string(before).replace(at, from.size(), to));
    folder_.write("shards/manifest.json", before);
    return what;
  }
  std::string fault() const {
    try {
      open();
    } catch (const InputError& error) {
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
      return error.what();
    }
    return "no fault";
  }
  std::string write_fault(std::string_view text, const TokenizeOptions& options = {},
                          const TokenEncoder& encoder = byte_encoder()) {
    try {
      write(text, options, encoder);
    } catch (const InputError& error) {
      return error.what();
    }
    return "no fault";
  }

  TempFolder folder_;
  fs::path path_ = folder_.path() / "shards";
};

TEST_F(Shards, HoldEveryDocumentOnceInOrder) {
  const auto expected = some_documents(500);
  const ShardCounts counts = write(joined(expected), {.validation_fraction = 0.1});
  const auto train = documents(Split::kTrain), validation = documents(Split::kValidation);
  EXPECT_EQ(counts.documents, 500);
  EXPECT_EQ(train.size() + validation.size(), 500u);
  EXPECT_NEAR(static_cast<double>(validation.size()), 50, 4 * std::sqrt(500 * 0.1 * 0.9));
  size_t t = 0, v = 0;
  for (const std::string& document : expected) {
    const bool in_train = t < train.size() && train[t] == document;
    ASSERT_TRUE(in_train || (v < validation.size() && validation[v] == document)) << document;
    in_train ? ++t : ++v;
  }
  const ShardSet shards = open();
  EXPECT_EQ(shards.tokens(Split::kTrain), counts.train_tokens);
  EXPECT_EQ(shards.counts().text_bytes, counts.text_bytes);
  EXPECT_EQ(counts.text_bytes + 500, counts.train_tokens + counts.validation_tokens);
  EXPECT_EQ(counts.validation_text_bytes,
            counts.validation_tokens - static_cast<int64_t>(validation.size()));
  shards.verify();
}

TEST_F(Shards, DoNotDependOnThreadsShardSizeOrPieces) {
  std::vector<std::string> all = some_documents(300);
  all[7] = std::string(40000, 'x') + "\nand a second line\n" + std::string(30000, 'y');
  const std::string text = joined(all);
  TokenizeOptions options{.validation_fraction = 0.05, .threads = 1};
  write(text, options);
  const std::string first_manifest = manifest();
  const auto train = ids(open(), Split::kTrain), validation = ids(open(), Split::kValidation);
  for (const int threads : {1, 3}) {
    options.threads = threads;
    write(text, options);
    EXPECT_EQ(manifest(), first_manifest);
  }
  for (const int64_t shard_tokens : {5000, 20011}) {
    options.shard_tokens = shard_tokens;
    write(text, options);
    EXPECT_EQ(ids(open(), Split::kTrain), train);
    EXPECT_EQ(ids(open(), Split::kValidation), validation);
    open().verify();
  }
  // A document in pieces stays one document: no EOS inside; its first piece decides its split.
  const ShardCounts counts = write(text, options, byte_encoder(), 64);
  EXPECT_EQ(counts.documents, 300);
  EXPECT_EQ(counts.train_tokens + counts.validation_tokens,
            static_cast<int64_t>(train.size() + validation.size()));
}

TEST_F(Shards, SideOfADocumentDependsOnItsTextAndTheSeed) {
  auto all = some_documents(400);
  for (int i = 0; i < 400; i += 3) all.push_back(all[static_cast<size_t>(i)]);  // repeats
  const TokenizeOptions options{.validation_fraction = 0.2, .seed = 5};
  const auto validation_of = [&](const TokenizeOptions& with) {
    write(joined(all), with);
    const auto found = documents(Split::kValidation);
    return std::multiset<std::string>(found.begin(), found.end());
  };
  const auto validation = validation_of(options);
  for (const std::string& document : documents(Split::kTrain)) {
    ASSERT_FALSE(validation.contains(document));
  }
  std::reverse(all.begin(), all.end());
  EXPECT_EQ(validation_of(options), validation);
  EXPECT_NE(validation_of({.validation_fraction = 0.2, .seed = 6}), validation);
}

TEST_F(Shards, ReadAnyRangeAcrossFiles) {
  write(joined(some_documents(20)), {.shard_tokens = 37});
  const ShardSet shards = open();
  const auto all = ids(shards, Split::kTrain);
  ASSERT_GT(all.size(), 300u);
  for (size_t begin = 0; begin < 150; begin += 7) {
    for (size_t size : {0, 1, 36, 37, 38, 120}) {
      std::vector<int32_t> part(size);
      shards.read(Split::kTrain, static_cast<int64_t>(begin), part);
      ASSERT_TRUE(std::equal(part.begin(), part.end(), all.begin() + static_cast<long>(begin)));
    }
  }
  std::vector<int32_t> one(1);
  EXPECT_THROW(shards.read(Split::kTrain, std::ssize(all), one), Error);
  EXPECT_THROW(shards.read(Split::kTrain, -1, one), Error);
}

TEST_F(Shards, WideVocabulariesTakeFourBytes) {
  TokenEncoder encoder = byte_encoder(65537);
  encoder.encode = [](std::string_view text, std::vector<int32_t>& out) {
    out.insert(out.end(), text.size(), 65536);
  };
  for (const int64_t vocab_size : {65536, 65537}) {
    encoder.vocab_size = vocab_size;
    if (vocab_size == 65536) {
      EXPECT_THROW(write("text", {}, encoder), Error);  // its ids exceed the vocabulary
      EXPECT_FALSE(fs::exists(path_));
      continue;
    }
    write("text and more text", {.validation_fraction = 0}, encoder);
    const auto found = ids(open(65537), Split::kTrain);
    EXPECT_EQ(found.size(), 19u);
    EXPECT_EQ(found[0], 65536);
    EXPECT_EQ(fs::file_size(path_ / "train-00000-000.bin"), 19u * 4);
  }
}

TEST_F(Shards, OneDocumentGivesItsTailToValidation) {
  const std::string text = std::string(99000, 'a') + std::string(1000, 'b');
  const TokenizeOptions options{.validation_fraction = 0.05, .shard_tokens = 20000};
  ShardCounts counts = write(text, options);
  EXPECT_EQ(counts.documents, 1);
  EXPECT_EQ(counts.validation_tokens, 5000);
  EXPECT_EQ(counts.train_tokens, 95001);
  EXPECT_EQ(counts.validation_text_bytes, 4999);
  std::vector<int32_t> all = ids(open(), Split::kTrain);
  const auto validation = ids(open(), Split::kValidation);
  all.insert(all.end(), validation.begin(), validation.end());
  std::vector<int32_t> expected;
  byte_encoder().encode(text, expected);
  expected.push_back(kEos);
  EXPECT_EQ(all, expected);
  open().verify();
  // The target is at least two windows of 2,048 or a tenth of the text, whichever is less.
  EXPECT_EQ(write(text, {.validation_fraction = 0.01}).validation_tokens, 4097);
  EXPECT_EQ(write(text.substr(0, 9999), {}).validation_tokens, 1000);
  EXPECT_EQ(write("abc", {}).validation_tokens, 1);
  EXPECT_EQ(write("a", {}).validation_tokens, 1);
  open().verify();
}

TEST_F(Shards, AGiantDocumentDoesNotTakeOverValidation) {
  // Some seeds put the giant in validation; every seed must still give the requested share.
  const std::string text = joined({std::string(50000, 'g'), "little", "less"});
  int64_t giant_first = 0;
  for (const double fraction : {0.4, 0.7}) {
    for (uint64_t seed = 0; seed < 8; ++seed) {
      const ShardCounts counts =
          write(text, {.validation_fraction = fraction, .shard_tokens = 30000, .seed = seed});
      const ShardSet shards = open();
      shards.verify();
      const double share = static_cast<double>(counts.validation_tokens) / 50013;
      EXPECT_GE(share, fraction * 0.49);
      EXPECT_LE(share, std::min(1.0, fraction * 2.01));
      EXPECT_GT(counts.train_tokens, 0);
      const auto validation = ids(shards, Split::kValidation);
      giant_first += validation[0] == 'g' && ids(shards, Split::kTrain)[0] != 'g';
      const auto eos = std::count(validation.begin(), validation.end(), kEos);
      EXPECT_EQ(counts.validation_text_bytes, counts.validation_tokens - eos);
    }
  }
  EXPECT_GT(giant_first, 0);
}

TEST_F(Shards, NoValidationWhenNoneIsAsked) {
  const ShardCounts counts = write(joined(some_documents(100)), {.validation_fraction = 0});
  EXPECT_EQ(counts.validation_tokens, 0);
  EXPECT_EQ(open().tokens(Split::kValidation), 0);
  EXPECT_EQ(documents(Split::kTrain), some_documents(100));
}

TEST_F(Shards, RefuseWhatCannotBeWritten) {
  EXPECT_THAT(write_fault(""), HasSubstr("no text"));
  EXPECT_THAT(write_fault("a", {.validation_fraction = 1}), HasSubstr("validation fraction"));
  EXPECT_THAT(write_fault("a", {.validation_fraction = -0.1}), HasSubstr("-0.1"));
  EXPECT_THAT(write_fault("a", {.validation_fraction = NAN}), HasSubstr("nan"));
  EXPECT_THAT(write_fault("a", {.shard_tokens = 0}), HasSubstr("0"));
  EXPECT_THAT(write_fault("a", {.threads = -1}), HasSubstr("threads"));
  TokenEncoder no_eos = byte_encoder();
  no_eos.eos = -1;
  EXPECT_THAT(write_fault("a", {}, no_eos), HasSubstr("end-of-text token"));
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(Shards, ReportProgress) {
  TokenizeProgress last;
  const std::string text = joined(std::vector<std::string>(40, std::string(200000, 'x')));
  const auto progress = [&](const TokenizeProgress& now) {
    EXPECT_GE(now.bytes_read, last.bytes_read);
    EXPECT_GE(now.tokens, last.tokens);
    EXPECT_EQ(now.total_bytes, static_cast<int64_t>(text.size()));
    EXPECT_EQ(now.parts, 1);
    last = now;
  };
  TokenEncoder slow = byte_encoder();
  slow.encode = [](std::string_view piece, std::vector<int32_t>& ids) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    byte_encoder().encode(piece, ids);
  };
  int64_t before_the_end = 0;
  const auto counted = [&](const TokenizeProgress& now) {
    before_the_end += now.bytes_read > 0 && now.bytes_read < now.total_bytes;
    progress(now);
  };
  write(text, {.threads = 1, .progress = counted}, slow);
  EXPECT_GE(before_the_end, 1);
  EXPECT_EQ(last.bytes_read, static_cast<int64_t>(text.size()));
  EXPECT_EQ(last.text_bytes, static_cast<int64_t>(text.size()) - 40);
  EXPECT_EQ(last.tokens, last.bytes_read);  // a token per byte, NUL as EOS
  EXPECT_EQ(last.parts_finished, 1);
  EXPECT_EQ(last.kept_bytes, 0);
}

// All files in the folder except the source text.
std::map<std::string, std::string> files_and_contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const bool is_text = entry.path().filename() == "text";
    if (entry.is_regular_file() && !is_text) files[entry.path().string()] = read_file(entry.path());
  }
  return files;
}

TEST_F(Shards, AFaultLeavesTheOldFolderWhole) {
  write(joined(some_documents(50)), {.shard_tokens = 500});
  const auto before = files_and_contents(folder_.path());
  ASSERT_GT(before.size(), 3u);

  EXPECT_THAT(write_fault(std::string(9 << 20, 'x') + '\xFF'), HasSubstr("invalid UTF-8"));
  EXPECT_EQ(files_and_contents(folder_.path()), before);

  TokenEncoder failing = byte_encoder();
  failing.encode = [](std::string_view, std::vector<int32_t>&) { throw Error("encoder fault"); };
  EXPECT_THROW(write("text", {}, failing), Error);
  EXPECT_EQ(files_and_contents(folder_.path()), before);

  const auto folder_before = files_and_contents(path_);
  const auto stop = [](const TokenizeProgress&) { throw Error("stopped by the user"); };
  EXPECT_THROW(write("text", {.progress = stop}), Error);
  EXPECT_EQ(files_and_contents(path_), folder_before);
}

TEST_F(Shards, AFullDiskLeavesTheOldFolderWhole) {
  write(joined(some_documents(50)));
  const auto before = files_and_contents(folder_.path());
  const std::string text(3 << 20, 'x');
  const fs::path file = folder_.write("text", text);
  TextSource source({.paths = {file}});

  // A file size limit simulates a full disk: write(2) fails in the same way.
  struct rlimit limit {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlim_t old_limit = limit.rlim_cur;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  limit.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::string what = "no fault";
  try {
    write_shards(source, byte_encoder(), path_, {});
  } catch (const InputError& error) {
    what = error.what();
  }
  limit.rlim_cur = old_limit;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, old_handler);

  EXPECT_THAT(what, AllOf(HasSubstr("cannot write"), HasSubstr("File too large")));
  EXPECT_EQ(files_and_contents(folder_.path()), before);
}

TEST_F(Shards, RefuseAnotherTokenizer) {
  write("some text");
  for (const auto& [hash, vocab_size] : {std::pair("other", 257), std::pair("bytes", 300)}) {
    try {
      ShardSet(path_, hash, vocab_size);
      FAIL() << "opened with " << hash;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("bytes"), HasSubstr(hash), HasSubstr("257"),
                                      HasSubstr("tokenize the text again")));
    }
  }
}

TEST_F(Shards, RefuseDamagedFolders) {
  EXPECT_THAT(fault(), HasSubstr("not a folder of token shards"));
  fs::create_directory(path_);
  EXPECT_THAT(fault(), HasSubstr("no manifest.json"));
  write(joined(some_documents(30)), {.shard_tokens = 500});
  EXPECT_EQ(fault(), "no fault");

  const fs::path shard = path_ / "train-00000-001.bin";
  const std::string good = read_file(shard);
  folder_.write("shards/train-00000-001.bin", good.substr(0, good.size() - 1));
  EXPECT_THAT(fault(), AllOf(HasSubstr("train-00000-001.bin has 999 bytes"), HasSubstr("1000")));
  fs::remove(shard);
  EXPECT_THAT(fault(), HasSubstr("No such file"));

  std::string altered = good;
  altered[10] = static_cast<char>(altered[10] ^ 1);
  folder_.write("shards/train-00000-001.bin", altered);
  EXPECT_THROW(open().verify(), InputError);
  altered[11] = '\x7F';  // the high byte of an id
  folder_.write("shards/train-00000-001.bin", altered);
  EXPECT_THROW(ids(open(), Split::kTrain), InputError);
  altered.replace(10, 2, "\x01\x01");  // the vocabulary's size, little-endian
  folder_.write("shards/train-00000-001.bin", altered);
  EXPECT_THROW(ids(open(), Split::kTrain), InputError);
}

TEST_F(Shards, RefuseAlteredManifests) {
  write(joined(some_documents(30)), {.validation_fraction = 0.5, .shard_tokens = 500});
  EXPECT_EQ(fault(), "no fault");
  EXPECT_THAT(fault_with("{", ""), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault_with("\"twell-shards\"", "\"else\""), HasSubstr("not the manifest"));
  EXPECT_THAT(fault_with("\"version\": 1", "\"version\": 2"), HasSubstr("version 2"));
  EXPECT_THAT(fault_with("\"vocab_size\": 257", "\"vocab_size\": 257.5"), HasSubstr("vocab_size"));
  EXPECT_THAT(fault_with("\"vocab_size\": 257", "\"vocab_size\": 258"), HasSubstr("258"));
  EXPECT_THAT(fault_with("\"u16\"", "\"u32\""), HasSubstr("dtype"));
  EXPECT_THAT(fault_with("\"seed\": 0", "\"seed\": -1"), HasSubstr("seed"));
  EXPECT_THAT(fault_with("\"documents\"", "\"document\""), HasSubstr("has no \"documents\""));
  EXPECT_THAT(fault_with("\"train\"", "\"trains\""), HasSubstr("has no \"train\""));
  EXPECT_THAT(fault_with("\"tokens\": 500", "\"tokens\": 501"), HasSubstr("tokens"));
  EXPECT_THAT(fault_with("\"tokens\": 500", "\"tokens\": 0"), HasSubstr("\"tokens\""));
  EXPECT_THAT(fault_with("\"tokens\": 500", "\"tokens\": 18446744073709551116"),
              HasSubstr("\"tokens\""));
  EXPECT_THAT(fault_with("\"tokens\": 500", "\"tokens\": 9223372036854775807"),
              HasSubstr("\"tokens\""));
  EXPECT_THAT(fault_with("\"shards\": [", "\"shards\": [7,"), HasSubstr("shard 0"));
  EXPECT_THAT(fault_with("train-00000-001.bin", "train-00000-000.bin"), HasSubstr("listed twice"));
  EXPECT_THAT(fault_with("\"crc64\": \"", "\"crc64\": \"0"), HasSubstr("16 hex digits"));
  for (const char* name :
       {"/etc/passwd", "../text", "..", ".", "", "a/b", "a\\\\b", ".hidden", "a\\u0000b", "a b"}) {
    EXPECT_THAT(fault_with("train-00000-000.bin", name), HasSubstr("plain name")) << name;
  }
  for (const char* text : {"", "[]", "null", "{}", "\"text\"", "{\"format\": 1}"}) {
    EXPECT_THAT(fault_with_manifest(text), HasSubstr("manifest.json"));
  }
  EXPECT_THAT(fault_with_manifest(std::string(100000, '[')), HasSubstr("nested more than"));
}

}  // namespace
}  // namespace twell
