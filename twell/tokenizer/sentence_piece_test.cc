// SPDX-License-Identifier: Apache-2.0
// Compares tokenizers converted from SentencePiece with Hugging Face `tokenizers`
// (tests/golden/make_sentence_piece_golden.py).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {
namespace {

using Ids = std::vector<std::vector<int32_t>>;

const std::filesystem::path kFolder =
    std::filesystem::path(TWELL_SOURCE_DIR) / "tests/golden/tokenizer";

const nlohmann::json& golden_cases() {
  static const nlohmann::json file =
      nlohmann::json::parse(read_file(kFolder / "sentence_piece.json"));
  return file;
}

void expect_ids(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                const Ids& expected) {
  ASSERT_EQ(texts.size(), expected.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(tokenizer.encode(texts[i]), expected[i]) << "text " << i << ": '" << texts[i] << "'";
  }
}

class SentencePiece : public testing::TestWithParam<const char*> {
 protected:
  Tokenizer load() const { return Tokenizer::load(kFolder / (std::string(GetParam()) + ".json")); }
};
INSTANTIATE_TEST_SUITE_P(Golden, SentencePiece, testing::Values("llama2", "mistral"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(SentencePiece, GivesTheIdsOfTheReference) {
  const Tokenizer tokenizer = load();
  const auto texts = golden_cases().at("texts").get<std::vector<std::string>>();
  const nlohmann::json& golden = golden_cases().at(GetParam());
  const Ids expected = golden.at("ids").get<Ids>();
  expect_ids(tokenizer, texts, expected);
  expect_ids(tokenizer, texts, expected);  // the second time, from the cache
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(tokenizer.decode(expected[i]), golden.at("decoded")[i].get<std::string>())
        << "text " << i << ": " << texts[i];
  }
  std::vector<int32_t> begun;
  tokenizer.encode_sequence("Hello world", begun);
  EXPECT_EQ(begun, golden.at("begun").get<std::vector<int32_t>>());
  EXPECT_EQ(tokenizer.eos_token(), tokenizer.find("</s>"));
  EXPECT_FALSE(tokenizer.lossless());
}

TEST_P(SentencePiece, SavesAndLoadsToTheSame) {
  const Tokenizer tokenizer = load();
  const Tokenizer again = Tokenizer::parse(tokenizer.to_json(), "again");
  EXPECT_EQ(again.to_json(), tokenizer.to_json());
  EXPECT_EQ(again.hash(), tokenizer.hash());
  EXPECT_EQ(again.bos_token(), 1);
  expect_ids(again, golden_cases().at("texts").get<std::vector<std::string>>(),
             golden_cases().at(GetParam()).at("ids").get<Ids>());
}

TEST_P(SentencePiece, MetaspaceMarksSpacesAsTheFileSays) {
  auto file = nlohmann::json::parse(read_file(kFolder / (std::string(GetParam()) + ".json")));
  const auto texts = golden_cases().at("texts").get<std::vector<std::string>>();
  const auto more = golden_cases().at("more").get<std::ptrdiff_t>();
  for (const char* scheme : {"always", "never"}) {
    file["normalizer"] = nullptr;
    file["pre_tokenizer"] = {{"type", "Metaspace"},
                             {"replacement", "\u2581"},
                             {"prepend_scheme", scheme},
                             {"split", true}};
    const Tokenizer tokenizer = Tokenizer::parse(file.dump(), scheme);
    const Ids expected = golden_cases().at(scheme).get<Ids>();
    expect_ids(tokenizer, {texts.end() - more, texts.end()}, expected);
    EXPECT_EQ(Tokenizer::parse(tokenizer.to_json(), scheme).hash(), tokenizer.hash());
    // Older files write this as add_prefix_space instead of prepend_scheme.
    file["pre_tokenizer"].erase("prepend_scheme");
    file["pre_tokenizer"]["add_prefix_space"] = scheme == std::string("always");
    EXPECT_EQ(Tokenizer::parse(file.dump(), scheme).hash(), tokenizer.hash());
  }
}

TEST_P(SentencePiece, BytesWithoutATokenRoundTrip) {
  const Tokenizer tokenizer = load();
  for (const std::string text :
       {"\xff", "a\x80\xffz", "\xe4\xb8", "\xf0\x9f\x98\x80\xc3", "a\0b"}) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (id == tokenizer.find("<norm>")) continue;  // its text starts with the mark
    const std::string bytes(tokenizer.token_bytes(id));
    EXPECT_EQ(tokenizer.token_bytes(tokenizer.find(bytes)), bytes);
  }
}

TEST(SentencePieceRefusal, NamesThePart) {
  struct Case {
    const char* pointer;
    nlohmann::json value;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"/normalizer/normalizers/0/prepend", "_", "Prepend of"},
      {"/normalizer/normalizers/1/content", "_", "a Replace other than"},
      {"/normalizer/normalizers/1/pattern", {{"Regex", " "}}, "a Replace other than"},
      {"/normalizer/normalizers/0", {{"type", "NFKC"}}, "normalizer \"NFKC\""},
      {"/pre_tokenizer", {{"type", "Whitespace"}}, "only Metaspace"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "last"}},
       "prepend_scheme \"last\""},
      {"/pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "_"}}, "another replacement"},
      {"/decoder", {{"type", "ByteLevel"}}, "only a Sequence"},
      {"/decoder/decoders/1", {{"type", "Fuse"}}, "only ByteFallback"},
      {"/decoder/decoders/3/start", 2, "a Strip other than"},
  };
  for (const Case& c : cases) {
    auto file = nlohmann::json::parse(read_file(kFolder / "llama2.json"));
    file[nlohmann::json::json_pointer(c.pointer)] = c.value;
    try {
      Tokenizer::parse(file.dump(), "f");
      ADD_FAILURE() << c.pointer;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(c.message), std::string::npos) << error.what();
    }
  }
  auto file = nlohmann::json::parse(read_file(kFolder / "llama2.json"));
  file["model"]["vocab"].erase("<0x41>");
  EXPECT_THROW(Tokenizer::parse(file.dump(), "f"), InputError);
}

}  // namespace
}  // namespace twell
