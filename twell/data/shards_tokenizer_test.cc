// SPDX-License-Identifier: Apache-2.0
// Shards made with real tokenizers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "twell/base/rng.h"
#include "twell/base/test_folder.h"
#include "twell/data/batch_sampler.h"
#include "twell/data/shard_writer.h"
#include "twell/data/shards.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

Tokenizer golden_tokenizer(const std::string& name) {
  return Tokenizer::load(fs::path(TWELL_SOURCE_DIR) / "tests/golden/tokenizer" / (name + ".json"));
}

// Lines as in code and prose: indented, empty, ending in spaces, with varied first characters.
std::string some_lines(uint64_t seed, int count) {
  const char* starts[] = {"",   "",      "  ",  "\t",           "\n",
                          "- ", "1999 ", "'s ", "\u4e2d\u6587", "Caf\u00e9 "};
  const char* ends[] = {"", ".", " ", "  ", ";\r", "?!", "\t", "42"};
  std::string text;
  for (int i = 0; i < count; ++i) {
    const auto random = philox(seed, 0, static_cast<uint64_t>(i));
    text += starts[random[0] % 10];
    for (uint32_t k = random[1] % 12; k > 0; --k) text += k % 3 == 0 ? "the words" : " it's";
    text += ends[random[2] % 8];
    text += '\n';
  }
  return text;
}

class ShardsOf : public ::testing::TestWithParam<const char*> {
 protected:
  TempFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(All, ShardsOf, ::testing::Values("gpt2", "smollm2", "llama3", "qwen2"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(ShardsOf, CuttingADocumentLeavesItsTokensAlone) {
  const Tokenizer tokenizer = golden_tokenizer(GetParam());
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::string text = some_lines(seed, 500);
    std::vector<int32_t> ids;
    for (size_t begin = 0; begin < text.size();) {
      const std::string_view rest = std::string_view(text).substr(begin);
      const size_t length = piece_length(rest, 4000);
      tokenizer.encode(rest.substr(0, length), ids, false);
      begin += length;
    }
    ASSERT_EQ(ids, tokenizer.encode(text, false)) << seed;
  }
}

TEST_P(ShardsOf, DecodeToTheDocuments) {
  const Tokenizer tokenizer = golden_tokenizer(GetParam());
  const std::string text = some_lines(1, 300) + "<|endoftext|> is not the end.";
  TextSource source({.paths = {folder_.write("text", text + '\0' + "second")}});
  const ShardCounts counts = write_shards(source, TokenEncoder::of(tokenizer),
                                          folder_.path() / "shards", {.validation_fraction = 0.1});
  const ShardSet shards(folder_.path() / "shards", tokenizer);
  EXPECT_EQ(shards.end_token(), tokenizer.eos_token());
  std::vector<int32_t> ids;
  int64_t validation_bytes = 0;
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    std::vector<int32_t> part(static_cast<size_t>(shards.tokens(split)));
    shards.read(split, 0, part);
    ids.insert(ids.end(), part.begin(), part.end());
    validation_bytes = std::ssize(tokenizer.decode(part, /*skip_special=*/true));
  }
  // Not compared with the text itself because SmolLM2's file has no token for some bytes.
  EXPECT_EQ(tokenizer.decode(ids, true),
            tokenizer.decode(tokenizer.encode(text, false)) + "second");
  EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer.eos_token()), 2);
  EXPECT_EQ(counts.text_bytes, std::ssize(text) + 6);
  EXPECT_EQ(counts.validation_text_bytes, validation_bytes);
}

TEST(ShardsTokenizer, ATrainedTokenizerFitsItsOwnShardsOnly) {
  const TempFolder folder;
  const std::string text = some_lines(7, 2000);
  TextSource source({.paths = {folder.write("text", text)}});
  const auto train = [&](int64_t vocab_size) {
    source.rewind();
    return train_bpe({.vocab_size = vocab_size, .threads = 2},
                     [&](std::string& piece) { return source.next(piece); });
  };
  const Tokenizer tokenizer = train(270), other = train(271);
  write_shards(source, TokenEncoder::of(tokenizer), folder.path() / "shards", {});
  const ShardSet shards(folder.path() / "shards", tokenizer);
  const BatchSampler sampler(shards, Split::kTrain, 64, 1, true);
  std::vector<int32_t> inputs(64), targets(64);
  sampler.sequence(0, inputs, targets);
  EXPECT_THAT(text, HasSubstr(tokenizer.decode(inputs)));
  try {
    ShardSet(folder.path() / "shards", other);
    FAIL() << "opened with another tokenizer";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(tokenizer.hash()), HasSubstr(other.hash())));
  }
}

}  // namespace
}  // namespace twell
