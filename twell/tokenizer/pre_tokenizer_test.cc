// SPDX-License-Identifier: Apache-2.0
// Tests pre-token boundaries, refused regular expressions, and NFC against utf8proc. The
// reference's pre-tokens come from tests/golden/make_tokenizer_golden.py.
#include "twell/tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <utf8proc.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/rng.h"
#include "twell/tokenizer/normalizer.h"
#include "twell/tokenizer/tokenizer_spec.h"

namespace twell {
namespace {

using testing::ElementsAre;
using Kind = PreTokenizerStep::Kind;

std::vector<std::string> split(const std::vector<PreTokenizerStep>& steps,
                               const std::string& text) {
  const PreTokenizer pre_tokenizer(steps);
  PreTokenizer::Scratch scratch;
  std::vector<std::string> pieces;
  pre_tokenizer.split(text, scratch, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

std::vector<std::string> split_regex(const std::string& regex, const std::string& text) {
  return split({{Kind::kSplit, regex}}, text);
}

TEST(PreTokenizer, StepsApplyToThePiecesOfTheStepBefore) {
  EXPECT_THAT(split({{Kind::kGpt2}}, "it's  12 x"), ElementsAre("it", "'s", " ", " 12", " x"));
  EXPECT_THAT(split({{Kind::kDigits}, {Kind::kGpt2}}, "it's  12 x"),
              ElementsAre("it", "'s", "  ", "1", "2", " x"));
  EXPECT_THAT(split({{Kind::kDigitRuns}}, "a12b3"), ElementsAre("a", "12", "b", "3"));
  EXPECT_THAT(split({}, "all of it"), ElementsAre("all of it"));
  EXPECT_THAT(split({{Kind::kGpt2}}, ""), ElementsAre());
}

// The texts have characters of every script and category, emoji, spaces, digits, marks and code.
TEST(PreTokenizer, CutsEveryScriptAsTheReference) {
  const std::filesystem::path folder =
      std::filesystem::path(TWELL_SOURCE_DIR) / "tests/golden/tokenizer";
  const auto golden = nlohmann::json::parse(read_file(folder / "pieces.json"));
  const auto texts = golden.at("texts").get<std::vector<std::string>>();
  for (const std::string name : {"gpt2", "smollm2", "llama3", "qwen2"}) {
    const TokenizerSpec spec = parse_tokenizer_json(read_file(folder / (name + ".json")), name);
    const auto expected = golden.at("lengths").at(name).get<std::vector<std::vector<size_t>>>();
    ASSERT_EQ(texts.size(), expected.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      std::string buffer;
      const std::string text(spec.nfc ? normalize_nfc(texts[i], buffer) : texts[i]);
      std::vector<size_t> lengths;
      for (const std::string& piece : split(spec.pre_tokenizer, text)) {
        lengths.push_back(piece.size());
      }
      EXPECT_EQ(lengths, expected[i]) << name << " text " << i;
    }
  }
}

TEST(PreTokenizer, WhatDoesNotMatchIsAPieceToo) {
  EXPECT_THAT(split_regex("b+", "abbcbd"), ElementsAre("a", "bb", "c", "b", "d"));
}

TEST(PreTokenizer, InvalidBytesArePiecesAndSeparateTheTextAroundThem) {
  EXPECT_THAT(split({{Kind::kGpt2}}, "ab\xff\xfe cd\xc3"),
              ElementsAre("ab", "\xff\xfe", " cd", "\xc3"));
  // A truncated character, an overlong form, a surrogate, and a code point beyond U+10FFFF.
  for (const std::string bad : {"\xe2\x82", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80"}) {
    EXPECT_THAT(split({{Kind::kGpt2}}, "a" + bad + "b"), ElementsAre("a", bad, "b"));
  }
  EXPECT_EQ(next_utf8_stretch("").size, 0);
}

TEST(PreTokenizer, LongRunsTakeLinearTime) {
  for (const std::string_view pattern : {kGpt2Pattern, kLlama3Pattern, kQwen2Pattern}) {
    for (const std::string unit :
         {" ", "\n", "a", "1", "-", "'", "\u3000", "\u0301", " a", "\t\n"}) {
      std::string text;
      while (text.size() < 300'000) text += unit;
      std::string joined;
      for (const std::string& piece : split_regex(std::string(pattern), text)) joined += piece;
      EXPECT_EQ(joined, text);
    }
  }
}

TEST(PreTokenizerRegex, ReadsWhatBothLibrariesReadAlike) {
  EXPECT_THAT(split_regex(R"(\s)", "a\u180eb\u3000c"), ElementsAre("a\u180eb", "\u3000", "c"));
  EXPECT_THAT(split_regex(R"([^\s-])", "a- "), ElementsAre("a", "- "));
  EXPECT_THAT(split_regex(R"([a\-c]+)", "ab-c"), ElementsAre("a", "b", "-c"));
  EXPECT_THAT(split_regex(R"([-a]+|])", "b-a]"), ElementsAre("b", "-a", "]"));
  EXPECT_THAT(split_regex(R"(\x41|\x{4e2d}|\u00e9|\v)", "xA\u4e2d\u00e9\x0b"),
              ElementsAre("x", "A", "\u4e2d", "\u00e9", "\x0b"));
  EXPECT_THAT(split_regex(R"((?<=a)b(?!c)|\d\D)", "abc ab1x"), ElementsAre("abc a", "b", "1x"));
  EXPECT_THAT(split_regex(R"((?>a+)b++)", "aabb!"), ElementsAre("aabb", "!"));
  EXPECT_THAT(split_regex(R"(\p{Lu}\P{Lu}{1,2})", "ABcdE"), ElementsAre("A", "Bcd", "E"));
}

TEST(PreTokenizerRegex, RefusesTheRestByName) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"(\w+)", "the escape \\w"},
      {R"(\ba)", "the escape \\b"},
      {R"((a)\1)", "the escape \\1"},
      {R"(\h)", "the escape \\h"},
      {R"(\K)", "the escape \\K"},
      {R"(\Qa\E)", "the escape \\Q"},
      {"\\\u00e9", "beyond ASCII"},
      {"a\\", "a trailing backslash"},
      {"^a", "an anchor"},
      {"a$", "an anchor"},
      {"[a[b]]", "a class inside a class"},
      {"[[:alpha:]]", "a class inside a class"},
      {"[a&&b]", "a class intersection"},
      {"[]a]", "begins with ]"},
      {"[a", "without its ]"},
      {R"([\S])", "\\S inside a class"},
      {R"([\s-z])", "a range that begins or ends with a set"},
      {R"([a-\s])", "a range that begins or ends with a set"},
      {R"(\p{Han})", "a general category"},
      {R"(\p{^L})", "a general category"},
      {R"(\pL)", "a general category"},
      {R"(\p{)", "a general category"},
      {R"(\xe9)", "raw-byte"},
      {R"(\x{110000000})", "malformed"},
      {R"(\u12)", "malformed"},
      {"a{1,2}+", "followed by"},
      {"a{2}?", "followed by"},
      {"a{,2}", "a { that is not"},
      {"a{x}", "a { that is not"},
      {"a{", "a { that is not"},
      {"(?i)a", "a group other than"},
      {"(?<n>a)", "a group other than"},
      {"(*UTF)a", "a group other than"},
      {"a|", "matches the empty text"},
      {"(?=a)", "matches the empty text"},
      {"(a", "does not compile"},
      {"a)", "does not compile"},
      {"a**", "does not compile"},
      {R"(\x{d800})", "does not compile"},
  };
  for (const auto& [pattern, message] : cases) {
    try {
      const PreTokenizerRegex regex(pattern);
      ADD_FAILURE() << "accepted: " << pattern;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(message)) << pattern;
    }
  }
}

TEST(PreTokenizerRegex, GivesUpWithAnErrorOnEndlessBacktracking) {
  EXPECT_THROW(split_regex("(a|a)+b", std::string(60, 'a') + "xb"), InputError);
}

std::string utf8(int32_t character) {
  std::array<utf8proc_uint8_t, 4> bytes;
  const auto size = utf8proc_encode_char(character, bytes.data());
  return {bytes.begin(), bytes.begin() + size};
}

std::string nfc(const std::string& text) {
  std::string buffer;
  return std::string(normalize_nfc(text, buffer));
}

std::string whole_nfc(const std::string& text) {
  utf8proc_uint8_t* mapped = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::string result(reinterpret_cast<char*>(mapped), static_cast<size_t>(size));
  std::free(mapped);
  return result;
}

// Planes that have no characters, and those for private use, are sampled: every 61st.
TEST(Normalizer, EveryCharacterAloneAndAmongOthers) {
  for (int32_t c = 0; c < 0x110000; c += c < 0x34000 || c >> 16 == 0xe ? 1 : 61) {
    if (c >= 0xd800 && c < 0xe000) continue;
    const std::string character = utf8(c);
    for (const std::string& text :
         {character, "e" + character, "\u0438" + character + "\u0301", "\uac00" + character}) {
      const std::string expected = is_unknown_to_reference(c) ? text : whole_nfc(text);
      ASSERT_EQ(nfc(text), expected) << "U+" << std::hex << c;
    }
  }
}

TEST(Normalizer, RandomTexts) {
  const std::vector<std::string> parts = {
      "a",      " ",      "e",      "\u0301", "\u0323", "\u00e9", "\u1100", "\u1161", "\u11a8",
      "\uac00", "\u4e2d", "\u212b", "\u0915", "\u093c", "\n",     "\u0438", "\u0306"};
  for (uint64_t stream = 0; stream < 2000; ++stream) {
    std::string text;
    for (uint64_t i = 0; i < stream % 40; ++i) {
      text += parts[uniform_below(11, stream, i, parts.size())];
    }
    ASSERT_EQ(nfc(text), whole_nfc(text)) << text;
    // Invalid bytes are unchanged, and the text on either side is normalized separately.
    ASSERT_EQ(nfc(text + "\xff" + text), whole_nfc(text) + "\xff" + whole_nfc(text));
  }
}

}  // namespace
}  // namespace twell
