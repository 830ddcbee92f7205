// SPDX-License-Identifier: Apache-2.0
// Tests that every refusal of a tokenizer.json is one line that names the part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/tokenizer/bpe_alphabet.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {
namespace {

using nlohmann::json;

// The 256 bytes, "th" and "the", and one added token.
json minimal() {
  json vocab;
  for (int byte = 0; byte < 256; ++byte) {
    vocab[bytes_to_alphabet(std::string(1, static_cast<char>(byte)))] = byte;
  }
  vocab["th"] = 256;
  vocab["the"] = 257;
  return {{"version", "1.0"},
          {"added_tokens", {{{"id", 258}, {"content", "<|endoftext|>"}, {"special", true}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array({"t h", "th e"})}}}};
}

std::string refusal(const std::string& text) {
  try {
    Tokenizer::parse(text, "some.json");
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::StartsWith("some.json"));
    EXPECT_THAT(error.what(), testing::Not(testing::HasSubstr("\n")));
    EXPECT_LT(std::string(error.what()).size(), 400);
    return error.what();
  }
  return "accepted";
}

std::string refusal_of(const std::function<void(json&)>& change) {
  json file = minimal();
  change(file);
  return refusal(file.dump());
}

json split(const std::string& regex) {
  return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
}
json byte_level() { return {{"type", "ByteLevel"}, {"add_prefix_space", false}}; }
json sequence(const json& members) { return {{"type", "Sequence"}, {"pretokenizers", members}}; }

TEST(TokenizerRefusal, TheMinimalFileIsAccepted) {
  const Tokenizer tokenizer = Tokenizer::parse(minimal().dump(), "minimal");
  EXPECT_THAT(tokenizer.encode("the<|endoftext|>th"), testing::ElementsAre(257, 258, 256));
  EXPECT_TRUE(tokenizer.lossless());
}

TEST(TokenizerRefusal, NamesThePart) {
  struct Case {
    const char* pointer;
    json value;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"/version", "2.0", "version \"2.0\""},
      {"/truncation", {{"max_length", 5}}, "\"truncation\" is not supported"},
      {"/padding", {{"strategy", "x"}}, "\"padding\" is not supported"},
      {"/surprise", 1, "the field \"surprise\""},
      {"/normalizer", {{"type", "Lowercase"}}, "normalizer \"Lowercase\""},
      {"/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}}, "\"NFKC\""},
      {"/normalizer", 5, "normalizer is not an object"},
      {"/pre_tokenizer", nullptr, "no pre_tokenizer"},
      {"/pre_tokenizer", {{"type", "Whitespace"}}, "type \"Whitespace\""},
      {"/pre_tokenizer", {{"type", "ByteLevel"}}, "\"add_prefix_space\""},
      {"/pre_tokenizer", {{"type", "Digits"}}, "without ByteLevel"},
      {"/pre_tokenizer", sequence(json::array()), "without ByteLevel"},
      {"/pre_tokenizer", sequence({byte_level(), {{"type", "Digits"}}}),
       "one ByteLevel, at its end"},
      {"/pre_tokenizer", sequence(json::array({sequence(json::array({byte_level()}))})),
       "type \"Sequence\""},
      {"/pre_tokenizer", sequence({split("\\w+"), byte_level()}), "the escape \\w"},
      {"/pre_tokenizer", sequence({split("a*"), byte_level()}), "matches the empty text"},
      {"/pre_tokenizer", sequence({split("(a"), byte_level()}), "does not compile"},
      {"/post_processor", {{"type", "BertProcessing"}}, "type \"BertProcessing\""},
      {"/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {{{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", "<|endoftext|>"}}}}}}},
       "a template other than"},
      {"/post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}}},
       "\"<s>\" is not an added token"},
      {"/decoder", nullptr, "no decoder"},
      {"/decoder", {{"type", "Metaspace"}}, "decoder \"Metaspace\""},
      {"/model", nullptr, "has no \"model\""},
      {"/model/type", "Unigram", "model type \"Unigram\""},
      {"/model/dropout", 0.1, "\"dropout\""},
      {"/model/byte_fallback", true, "not supported with byte_fallback"},
      {"/model/fuse_unk", true, "\"fuse_unk\""},
      {"/model/continuing_subword_prefix", "##", "\"continuing_subword_prefix\""},
      {"/model/end_of_word_suffix", "</w>", "\"end_of_word_suffix\""},
      {"/model/unk_token", "<unk>", "\"unk_token\" \"<unk>\""},
      {"/model/ignore_merges", 1, "\"ignore_merges\" must be true or false, got 1"},
      {"/model/vocab", json::array(), "\"vocab\" must be an object, got []"},
      {"/model/vocab/the", 300, "no gaps"},
      {"/model/vocab/the", 256, "of another token"},
      {"/model/vocab/the", -1, "not a token id"},
      {"/model/vocab/the", 1.5, "not a token id"},
      {"/model/vocab/the", 1e300, "not a token id"},
      {"/model/vocab/the", "7", "not a token id"},
      {"/model/vocab/the", uint64_t{1} << 40, "not a token id"},
      {"/model/vocab/ \u4e2d", 258, "not spelled in the byte alphabet"},
      {"/model/merges", {{"a", 1}}, "\"merges\" must be an array, got {\"a\":1}"},
      {"/model/merges/0", "t", "not two tokens"},
      {"/model/merges/0", "t h e", "not two tokens"},
      {"/model/merges/0", {"t", "h", "e"}, "neither"},
      {"/model/merges/0", 5, "neither"},
      {"/model/merges/0", " h", "not spelled"},
      {"/model/merges/0", "h t", "\"ht\" is not in the vocabulary"},
      {"/model/merges/1", "t h", "repeats merge 0"},
      {"/added_tokens", 5, "\"added_tokens\" must be an array, got 5"},
      {"/added_tokens/0/content", "", "\"content\" is empty"},
      {"/added_tokens/0/content", "the", "another one in the vocabulary"},
      {"/added_tokens/0/single_word", 1, "\"single_word\" must be true or false"},
      {"/added_tokens/1", {{"id", 259}, {"content", "<|endoftext|>"}}, "twice"},
  };
  for (const Case& c : cases) {
    const std::string message =
        refusal_of([&](json& file) { file[json::json_pointer(c.pointer)] = c.value; });
    EXPECT_THAT(message, testing::HasSubstr(c.message)) << c.pointer << " = " << c.value;
  }
}

TEST(TokenizerRefusal, MalformedJson) {
  const std::string good = minimal().dump();
  for (size_t size = 0; size < good.size(); size += 97) refusal(good.substr(0, size));
  EXPECT_THAT(refusal(""), testing::HasSubstr("not valid JSON at byte 1: it is empty"));
  EXPECT_THAT(refusal("[1,2]"), testing::HasSubstr("the file is not an object"));
  EXPECT_THAT(refusal("{\"version\": \"\xff\"}"),
              testing::HasSubstr("byte 14: bytes that are not"));
  EXPECT_THAT(refusal("{\"version\": 1e999}"), testing::HasSubstr("a number too large"));
  for (const std::string open : {"[", "{\"model\":", "{\"normalizer\":["}) {
    std::string deep;
    for (int i = 0; i < 200'000; ++i) deep += open;
    EXPECT_THAT(refusal(deep), testing::HasSubstr("nested more than"));
  }
  std::string closed = R"({"normalizer":)";
  closed.append(200'000, '[').append(200'000, ']').append("}");
  EXPECT_NE(refusal(closed), "accepted");
}

TEST(TokenizerRefusal, ALongNameIsCutInTheMessage) {
  EXPECT_THAT(refusal_of([](json& file) {
                std::string name(100'000, 'x');
                name.push_back('\n');
                file["normalizer"]["type"] = name;
              }),
              testing::HasSubstr("xxx..."));
}

TEST(TokenizerRefusal, UnknownBytesBecomeTheUnknownTokenWhenThereIsOne) {
  json file = minimal();
  json& vocab = file["model"]["vocab"];
  vocab["the"] = vocab["q"];  // "q" loses its token, "the" takes the id
  vocab.erase("q");
  file["added_tokens"][0]["id"] = 257;
  file["model"]["merges"] = {"t h", "th e"};
  const Tokenizer dropping = Tokenizer::parse(file.dump(), "dropping");
  EXPECT_FALSE(dropping.lossless());
  EXPECT_EQ(dropping.decode(dropping.encode("aqb tqhe")), "ab the");
  EXPECT_EQ(dropping.encode("tqhe"), dropping.encode("the"));
  EXPECT_THAT(dropping.encode("q"), testing::IsEmpty());

  file["model"]["unk_token"] = "<|endoftext|>";
  vocab["<|endoftext|>"] = 257;
  const Tokenizer unknown = Tokenizer::parse(file.dump(), "unknown");
  EXPECT_FALSE(unknown.lossless());
  EXPECT_EQ(unknown.decode(unknown.encode("aqb")), "a<|endoftext|>b");
  EXPECT_EQ(Tokenizer::parse(unknown.to_json(), "saved").to_json(), unknown.to_json());
}

}  // namespace
}  // namespace twell
