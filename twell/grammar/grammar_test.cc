// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "twell/base/error.h"
#include "twell/grammar/json_schema.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

constexpr int32_t kEnd = 0;

// End of text, the bytes, and tokens of several bytes, some of which end inside a character.
Tokenizer merged_tokenizer() {
  bool given = false;
  return train_bpe({.vocab_size = 420, .threads = 1}, [&](std::string& text) {
    text.clear();
    for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
    for (int i = 0; i < 40; ++i) {
      text +=
          R"({"name": "Ada", "age": 36, "tags": ["a", "b"], "x": null, "y": true, "z": -1.5e3} )";
      text += "größe größer \U0001F600 \U0001F601 ";
    }
    return !std::exchange(given, true);
  });
}

GrammarOptions ends_at_end() { return {.end_tokens = {kEnd}}; }

class GrammarTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::available()) GTEST_SKIP() << "built without XGrammar";
  }
  std::vector<uint32_t> mask_of(TokenFilter& filter) const {
    std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(tokenizer_.vocab_size())));
    filter.allowed(mask);
    return mask;
  }
  // The tokens of a text, chosen at random among those that its bytes begin with.
  std::vector<int32_t> random_tokens(std::string_view text, std::mt19937& random) const {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      std::vector<int32_t> fitting;
      for (int32_t id = 1; id < tokenizer_.vocab_size(); ++id) {
        if (text.starts_with(tokenizer_.token_bytes(id))) fitting.push_back(id);
      }
      ids.push_back(fitting[random() % fitting.size()]);
      text.remove_prefix(tokenizer_.token_bytes(ids.back()).size());
    }
    return ids;
  }

  Tokenizer tokenizer_ = merged_tokenizer();
  GrammarCompiler compiler_{tokenizer_, ends_at_end()};
};

enum class Fit { kNo, kBegins, kWhole };  // of a text by a language

// Whether a text is, or begins, one of a few words.
Fit fits_words(const std::vector<std::string>& words, std::string_view text) {
  Fit fit = Fit::kNo;
  for (const std::string& word : words) {
    if (word == text) return Fit::kWhole;
    if (word.starts_with(text)) fit = Fit::kBegins;
  }
  return fit;
}

struct Language {
  const char* name;
  GrammarText grammar;
  std::vector<std::string> words;  // all of them
};

std::vector<Language> languages() {
  using Kind = GrammarText::Kind;
  std::vector<std::string> pairs;
  for (const char* a : {"a", "bc", "größe", "\U0001F600"}) {
    for (const char* b : {"", "x", "xx"}) pairs.push_back(std::string(a) + b);
  }
  std::vector<std::string> digits;
  for (int i = 10; i <= 99; ++i) digits.push_back(std::to_string(i));
  std::vector<std::string> ages;
  for (int i = -3; i <= 12; ++i) ages.push_back(std::to_string(i));
  return {
      {"ebnf",
       {Kind::kEbnf, "root ::= (\"a\" | \"bc\" | \"größe\" | \"\U0001F600\") \"x\"{0,2}"},
       pairs},
      {"classes", {Kind::kEbnf, "root ::= [1-9] d\nd ::= [0-9]"}, digits},
      {"constant", {Kind::kJsonSchema, R"({"const": "größer \"x\""})"}, {R"("größer \"x\"")"}},
      {"enumeration",
       {Kind::kJsonSchema, R"({"enum": ["a", 1, null, true]})"},
       {R"("a")", "1", "null", "true"}},
      {"range", {Kind::kJsonSchema, R"({"type": "integer", "minimum": -3, "maximum": 12})"}, ages},
      {"pattern",
       {Kind::kJsonSchema, R"({"type": "string", "pattern": "^(ab|c)d?$"})"},
       {R"("ab")", R"("abd")", R"("c")", R"("cd")"}},
      {"boolean",
       {Kind::kJsonSchema, R"({"type": ["boolean", "null"]})"},
       {"true", "false", "null"}},
  };
}

// The mask is exact: for every text that a language begins with, every token is allowed if and only
// if the text with it still fits, and the end if and only if the text is a word.
TEST_F(GrammarTest, MasksEqualABruteForceCheckOfEveryToken) {
  std::mt19937 random(1);
  for (const Language& language : languages()) {
    const Grammar grammar = compiler_.compile(language.grammar);
    for (const std::string& word : language.words) {
      const std::vector<int32_t> ids = random_tokens(word, random);
      const auto filter = grammar.filter(std::vector<int32_t>{kEnd});
      std::string text;
      for (size_t i = 0; i <= ids.size(); ++i) {
        const std::vector<uint32_t> mask = mask_of(*filter);
        for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
          const bool want =
              id == kEnd ? fits_words(language.words, text) == Fit::kWhole
                         : fits_words(language.words,
                                      text + std::string(tokenizer_.token_bytes(id))) != Fit::kNo;
          ASSERT_EQ(mask_allows(mask, id), want)
              << language.name << ": after \"" << text << "\", token " << id << " \""
              << tokenizer_.token_bytes(id) << "\"";
        }
        if (i == ids.size()) break;
        filter->accept(i, ids[i]);
        text += tokenizer_.token_bytes(ids[i]);
      }
      EXPECT_FALSE(filter->ended());
      filter->accept(ids.size(), kEnd);
      EXPECT_TRUE(filter->ended());
      EXPECT_EQ(mask_of(*filter)[2], ~0u);
    }
  }
}

TEST_F(GrammarTest, ObjectsAndTheirTokensAreTakenBack) {
  const Grammar grammar = compiler_.compile(
      {GrammarText::Kind::kJsonSchema,
       R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
           "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "age"]})"});
  std::mt19937 random(2);
  for (const char* text :
       {R"({"name": "Ada", "age": 36})", R"({"name":"größe\n","age":-1,"tags":[]})",
        "{\n  \"name\": \"\",\n  \"age\": 0,\n  \"tags\": [\"a\", \"b\"]\n}"}) {
    const std::vector<int32_t> ids = random_tokens(text, random);
    const auto filter = grammar.filter(std::vector<int32_t>{kEnd});
    std::vector<std::vector<uint32_t>> masks;
    for (size_t i = 0; i < ids.size(); ++i) {
      masks.push_back(mask_of(*filter));
      ASSERT_TRUE(mask_allows(masks.back(), ids[i])) << text << ", token " << i;
      ASSERT_FALSE(mask_allows(masks.back(), kEnd));
      filter->accept(i, ids[i]);
      filter->accept(i, ids[i]);  // told twice
    }
    ASSERT_TRUE(mask_allows(mask_of(*filter), kEnd));
    filter->accept(ids.size(), kEnd);
    // A token behind the end, as a step that began early draws it, and back.
    filter->accept(ids.size() + 1, 17);
    for (size_t i = ids.size(); i-- > 0;) {
      if (i % 3 != 0) continue;
      filter->rewind(i);
      ASSERT_EQ(mask_of(*filter), masks[i]) << i;
    }
    filter->accept(0, ids[0]);
    ASSERT_EQ(mask_of(*filter), masks[1]);
    EXPECT_THROW(filter->accept(5, ids[5]), Error);
  }
  // Properties that are not listed, and an object without one that is required.
  for (const char* text : {R"({"nam_)", R"({"name": "a"})", R"({"age)", R"([)"}) {
    const auto filter = grammar.filter(std::vector<int32_t>{kEnd});
    const std::vector<int32_t> ids = random_tokens(text, random);
    bool fits = true;
    for (size_t i = 0; i < ids.size() && fits; ++i) {
      fits = mask_allows(mask_of(*filter), ids[i]);
      filter->accept(i, ids[i]);
    }
    EXPECT_FALSE(fits) << text;
  }
}

// Against the standard library's regular expressions, on every text of up to five letters.
TEST_F(GrammarTest, PatternsAreThoseOfRegularExpressions) {
  const char* patterns[] = {
      "(ab+)?c",    "(a+b)?c",       "a(bc*)?",     "(a*b)?c",    "(ab*|c){2,}", "(ab*|c){0,}",
      "(a|b)?c",    "((ab)+c)?a",    "a?b?c?",      "(ab?)+",     "(a{1,2}b)?c", "(ab*){0,2}",
      "((a|b*)c)?", "(ab*|c){2}",    "a(|b+)c",     "(a+)?b",     "(?:ab+)?c",   "(a*)*b",
      "(a(bc?)?)?", "(a|bc*){1,2}c", "(a*|b){3,}c", "[ab]{2,}c?", "(ab)*?c"};
  std::vector<std::string> texts = {""};
  for (size_t i = 0; texts[i].size() < 5; ++i) {
    for (const char* one : {"a", "b", "c"}) texts.push_back(texts[i] + one);
  }
  for (const std::string pattern : patterns) {
    const std::regex expression(pattern);
    const Grammar grammar =
        compiler_.compile({GrammarText::Kind::kJsonSchema,
                           R"({"type": "string", "pattern": "^)" + pattern + R"($"})"});
    for (const std::string& text : texts) {
      const auto filter = grammar.filter(std::vector<int32_t>{kEnd});
      bool fits = true;
      for (uint64_t i = 0; const char one : "\"" + text + "\"") {
        const int32_t id = tokenizer_.find(std::string(1, one));
        fits = fits && mask_allows(mask_of(*filter), id);
        if (fits) filter->accept(i++, id);
      }
      ASSERT_EQ(fits, std::regex_match(text, expression)) << pattern << ": " << text;
    }
  }
}

// Blanks come to an end, so that a model that writes nothing else does not run to its limit.
TEST_F(GrammarTest, BlanksAreBounded) {
  const Grammar grammar = compiler_.compile({GrammarText::Kind::kJson, ""});
  const auto filter = grammar.filter(std::vector<int32_t>{kEnd});
  const int32_t brace = tokenizer_.find("{"), blank = tokenizer_.find("\n");
  filter->accept(0, brace);
  uint64_t blanks = 0;
  while (mask_allows(mask_of(*filter), blank) && blanks < 1000) filter->accept(++blanks, blank);
  EXPECT_EQ(blanks, 32u);
}

TEST_F(GrammarTest, WithoutEndTokensATextEndsWhenItIsComplete) {
  const Grammar grammar = compiler_.compile({GrammarText::Kind::kEbnf, R"(root ::= "ab")"});
  const auto filter = grammar.filter({});
  const int32_t a = tokenizer_.find("a"), b = tokenizer_.find("b");
  EXPECT_FALSE(filter->ended());
  filter->accept(0, a);
  EXPECT_FALSE(filter->ended());
  EXPECT_FALSE(mask_allows(mask_of(*filter), kEnd));
  filter->accept(1, b);
  EXPECT_TRUE(filter->ended());
}

// Marks of tool calls are tokens of their own, other special tokens are never drawn.
TEST_F(GrammarTest, SpecialTokensOnlyAsMarks) {
  bool given = false;
  const Tokenizer special =
      train_bpe({.vocab_size = 260,
                 .special_tokens = {"<|endoftext|>", "<tool_call>", "<other>"},
                 .threads = 1},
                [&](std::string& text) {
                  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
                  return !std::exchange(given, true);
                });
  GrammarCompiler compiler(special, {.end_tokens = {0}, .marks = {"<tool_call>"}});
  const auto filter = compiler.compile({GrammarText::Kind::kEbnf, R"(root ::= [^a]*)"})
                          .filter(std::vector<int32_t>{0});
  std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(special.vocab_size())));
  filter->allowed(mask);
  EXPECT_TRUE(mask_allows(mask, 0));
  EXPECT_FALSE(mask_allows(mask, 2));
  // It has no "a" and fits, letter by letter, as the byte "<" does.
  EXPECT_FALSE(mask_allows(mask, special.find("a")));
  const auto marked = compiler.compile({GrammarText::Kind::kEbnf, R"(root ::= "<tool_call>{")"})
                          .filter(std::vector<int32_t>{0});
  marked->allowed(mask);
  EXPECT_TRUE(mask_allows(mask, 1));
  EXPECT_TRUE(mask_allows(mask, special.find("<")));
  EXPECT_FALSE(mask_allows(mask, 2));
}

std::string refusal(GrammarCompiler& compiler, GrammarText::Kind kind, const std::string& text) {
  try {
    compiler.compile({kind, text});
  } catch (const InputError& error) {
    return error.what();
  }
  return "taken";
}

TEST_F(GrammarTest, WhatCannotBeKeptIsRefusedByName) {
  using testing::HasSubstr;
  const auto of = [&](const std::string& schema) {
    return refusal(compiler_, GrammarText::Kind::kJsonSchema, schema);
  };
  EXPECT_THAT(of(R"({"properties": {"a": {"not": {"const": 3}}}, "type": "object"})"),
              HasSubstr("\"not\" is not supported at \"/properties/a/not\""));
  EXPECT_THAT(of(R"({"type": "string", "not": {"enum": ["a"]}})"), HasSubstr("\"not\""));
  EXPECT_THAT(of(R"({"not": {"pattern": "a"}, "type": "string"})"),
              HasSubstr("\"pattern\" that must not hold is not supported at \"/not/pattern\""));
  EXPECT_THAT(of(R"({"if": {"items": {}}, "else": {}})"), HasSubstr("at \"/if/items\""));
  EXPECT_THAT(of(R"({"not": {"type": "integer"}})"), HasSubstr("not whole"));
  EXPECT_THAT(of(R"({"not": {}})"), testing::Not("taken"));
  EXPECT_THAT(of(R"({"if": {"required": ["a"]}, "then": {"required": ["b"]},
                     "properties": {"a": {}, "b": {}}, "unevaluatedProperties": false})"),
              HasSubstr("unevaluated"));
  EXPECT_THAT(of(R"({"contains": {"const": 1}, "maxItems": 3, "maxContains": 1})"),
              HasSubstr("maxContains"));
  EXPECT_THAT(of(R"({"contains": {"const": 1}, "maxItems": 3, "minContains": 2})"),
              HasSubstr("minContains"));
  EXPECT_THAT(of(R"({"contains": {"const": 1}, "maxItems": 65})"), HasSubstr("at most 64"));
  EXPECT_THAT(of(R"({"$id": "http://x/a", "$ref": "b#/$defs/c", "$defs": {"c": {}}})"),
              HasSubstr("outside"));
  EXPECT_THAT(of(R"({"type": "array", "uniqueItems": true})"), HasSubstr("uniqueItems"));
  EXPECT_THAT(of(R"({"type": "array", "contains": {}})"), HasSubstr("contains"));
  EXPECT_THAT(of(R"({"type": "number", "multipleOf": 0.5})"), HasSubstr("multipleOf"));
  EXPECT_THAT(of(R"({"type": "string", "pattern": "a*", "maxLength": 3})"), HasSubstr("pattern"));
  EXPECT_THAT(of(R"({"type": "string", "format": "color"})"), HasSubstr("color"));
  EXPECT_THAT(of(R"({"type": "string", "pattern": "^\\t$"})"), HasSubstr("control"));
  EXPECT_THAT(of(R"({"allOf": [{"pattern": "a"}, {"pattern": "b"}]})"), HasSubstr("pattern"));
  EXPECT_THAT(of(R"({"allOf": [{"properties": {"a": {}}}, {"patternProperties": {"a": {}}}]})"),
              HasSubstr("\"properties\" beside what it is merged with"));
  EXPECT_THAT(of(R"({"allOf": [{"type": "string"}, {"minimum": 3, "type": "integer"}]})"),
              HasSubstr("no value fits"));
  EXPECT_THAT(of(R"({"enum": [1, 2], "minimum": 3})"), HasSubstr("no value fits"));
  EXPECT_THAT(of(R"({"properties": {"a": false}, "required": ["a"]})"), HasSubstr("no value fits"));
  EXPECT_THAT(of(R"({"properties": {"a": false}, "additionalProperties": true})"),
              HasSubstr("no value fits"));
  EXPECT_THAT(of(R"({"$ref": "#", "minimum": 1})"), HasSubstr("refer to themselves"));
  EXPECT_THAT(of(R"({"allOf": [{"unevaluatedProperties": false}, {"properties": {"a": {}}}]})"),
              HasSubstr("unevaluatedProperties"));
  EXPECT_THAT(of(R"({"$ref": "http://x/y"})"), HasSubstr("outside"));
  EXPECT_THAT(of(R"({"$ref": "#/$defs/a"})"), HasSubstr("nowhere"));
  EXPECT_THAT(of(R"({"type": "thing"})"), HasSubstr("thing"));
  EXPECT_THAT(of(R"({"type": "string", "pattern": "(?=a)b"})"), testing::Not("taken"));
  EXPECT_THAT(of(R"(false)"), HasSubstr("refused"));
  EXPECT_THAT(of(R"([1])"), HasSubstr("object"));
  EXPECT_THAT(of(R"({"type")"), HasSubstr("not valid JSON"));
  std::string deep = R"({"type": "string"})";
  for (int i = 0; i < 40; ++i) deep = R"({"type": "array", "items": )" + deep + "}";
  EXPECT_THAT(of(deep), HasSubstr("deep"));
  const auto ebnf = [&](const std::string& text) {
    return refusal(compiler_, GrammarText::Kind::kEbnf, text);
  };
  EXPECT_THAT(ebnf("root ::= *"), testing::Not("taken"));
  EXPECT_THAT(ebnf("other ::= \"a\""), HasSubstr("root"));
  EXPECT_THAT(ebnf("root ::= missing"), HasSubstr("missing"));
  EXPECT_THAT(ebnf("root ::= " + std::string(5000, '(')), HasSubstr("deep"));
  EXPECT_THAT(ebnf(std::string(300 << 10, 'a')), HasSubstr("at most"));
  // A refusal is kept as well, and what is right is still taken.
  EXPECT_EQ(of(R"([1])"), of(R"([1])"));
  EXPECT_EQ(of(R"({"type": "string"})"), "taken");
}

TEST_F(GrammarTest, TheCacheIsBounded) {
  GrammarCompiler compiler(tokenizer_, {.end_tokens = {kEnd}, .most_cached = 2});
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 5; ++i) {
      const auto filter =
          compiler.compile({GrammarText::Kind::kEbnf, fmt::format("root ::= \"{}\"", i)})
              .filter(std::vector<int32_t>{kEnd});
      EXPECT_TRUE(mask_allows(mask_of(*filter), tokenizer_.find(std::to_string(i))));
    }
  }
}

// The one that is used again and again is kept, though it is the oldest.
TEST_F(GrammarTest, TheCacheKeepsWhatIsUsed) {
  const auto text = [](int i) {
    return GrammarText{GrammarText::Kind::kEbnf, fmt::format("root ::= \"{}\"", i)};
  };
  GrammarCompiler compiler(tokenizer_, {.end_tokens = {kEnd}, .most_cached = 3});
  compiler.compile(text(0));
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(compiler.order(text(0)).is_ready()) << i;
    compiler.compile(text(1 + i % 5));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // another thread forgets
  }
}

// The cache drops the grammar that was not used for longest, and counts its bytes no more.
TEST_F(GrammarTest, TheCacheForgetsTheOldestByItsBytes) {
  const auto text = [](int i) {
    return GrammarText{GrammarText::Kind::kEbnf, fmt::format("root ::= \"{}\" [0-9]*", i)};
  };
  const int64_t each = compiler_.compile(text(0)).bytes();
  GrammarCompiler compiler(tokenizer_,
                           {.end_tokens = {kEnd}, .most_cached_bytes = 3 * each + each / 2});
  const auto is_kept = [&](int i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // another thread forgets
    return compiler.order(text(i)).is_ready();
  };
  for (int i = 0; i < 5; ++i) compiler.compile(text(i));
  for (int repeat = 0; repeat < 30; ++repeat) EXPECT_TRUE(is_kept(4));
  bool kept = true;
  for (int repeat = 0; repeat < 1000 && kept; ++repeat) {
    for (int i = 1; i < 5; ++i) compiler.compile(text(i));
    kept = is_kept(0);
  }
  EXPECT_FALSE(kept);
}

// A text that was left stays so until the token that left it is taken back.
TEST_F(GrammarTest, TokensBehindTheOneThatDoesNotFitAreTakenBack) {
  const Grammar grammar = compiler_.compile({GrammarText::Kind::kEbnf, R"(root ::= "ab")"});
  const auto filter = grammar.filter(std::vector<int32_t>{kEnd});
  const int32_t a = tokenizer_.find("a"), b = tokenizer_.find("b");
  filter->accept(0, a);
  const std::vector<uint32_t> behind_a = mask_of(*filter);
  EXPECT_FALSE(mask_allows(behind_a, a));
  filter->accept(1, a);
  const std::vector<uint32_t> left = mask_of(*filter);
  EXPECT_TRUE(mask_allows(left, a));
  filter->accept(2, b);
  filter->accept(3, b);
  for (const uint64_t kept : {3u, 2u}) {
    filter->rewind(kept);
    EXPECT_EQ(mask_of(*filter), left) << kept;
  }
  filter->rewind(1);
  EXPECT_EQ(mask_of(*filter), behind_a);
}

// Takes long to compile.
std::string large_grammar() {
  std::string large = "root ::= ";
  for (int i = 0; i < 12000; ++i) large += fmt::format("[a-z{}]* \"{}\" | ", i % 10, i);
  return large + "\"a\"";
}

TEST_F(GrammarTest, AGrammarThatTakesTooLongIsGivenUp) {
  GrammarCompiler compiler(tokenizer_,
                           {.end_tokens = {kEnd}, .most_time = std::chrono::milliseconds(100)});
  EXPECT_THAT(refusal(compiler, GrammarText::Kind::kEbnf, large_grammar()),
              testing::HasSubstr("takes more than"));
}

// An order returns at once and tells when the grammar is there; nobody hears of one that has ended.
TEST_F(GrammarTest, OrdersDoNotWait) {
  GrammarCompiler compiler(tokenizer_,
                           {.end_tokens = {kEnd}, .most_time = std::chrono::milliseconds(300)});
  std::atomic<int> told = 0, never = 0;
  GrammarOrder slow = compiler.order({GrammarText::Kind::kEbnf, large_grammar()});
  EXPECT_FALSE(slow.is_ready());
  slow.notify([&] { ++told; });
  GrammarOrder quick = compiler.order({GrammarText::Kind::kEbnf, R"(root ::= "a")"});
  EXPECT_FALSE(quick.is_ready());  // it waits for the other
  quick.notify([&] { ++told; });
  compiler.order({GrammarText::Kind::kEbnf, R"(root ::= "b")"}).notify([&] { ++never; });
  while (told < 2) std::this_thread::yield();
  EXPECT_THROW(slow.get(), InputError);
  // The quick one waited behind the slow one: its time is over too, or it was compiled just in
  // time.
  EXPECT_TRUE(quick.is_ready());
  quick.notify([&] { ++told; });
  EXPECT_EQ(told, 3);
  EXPECT_EQ(never, 0);
  compiler_.compile({GrammarText::Kind::kEbnf, R"(root ::= "c")"});
  EXPECT_TRUE(compiler_.order({GrammarText::Kind::kEbnf, R"(root ::= "c")"}).is_ready());
}

TEST_F(GrammarTest, FewOrdersWait) {
  std::vector<GrammarOrder> orders;
  orders.push_back(compiler_.order({GrammarText::Kind::kEbnf, large_grammar()}));
  const auto order_many = [&] {
    for (int i = 0; i < 30; ++i) {
      orders.push_back(
          compiler_.order({GrammarText::Kind::kEbnf, fmt::format("root ::= \"{}\"", i)}));
    }
  };
  EXPECT_THROW(order_many(), GrammarBusy);
  EXPECT_GT(orders.size(), 10u);
}

TEST(JsonSchema, ObjectsThatListTheirPropertiesAreClosed) {
  const auto of = [](const char* text) {
    return nlohmann::ordered_json::parse(checked_json_schema(text, "test"));
  };
  EXPECT_EQ(of(R"({"type": "object", "properties": {"b": {}, "a": {}}})").dump(),
            R"({"type":"object","properties":{"b":{},"a":{}},"additionalProperties":false})");
  EXPECT_EQ(of(R"({"type": "object"})")["additionalProperties"], true);
  EXPECT_EQ(of(R"({"type": "array"})")["items"], true);
  EXPECT_EQ(of(R"({"type": "object", "properties": {"a": {}}, "additionalProperties": true})")
                ["additionalProperties"],
            true);
  EXPECT_EQ(of(R"({"type": "object", "properties": {"a": {}}, "required": ["b"]})")
                ["additionalProperties"],
            true);
  EXPECT_EQ(of(R"({"$defs": {"x": {"type": "object", "properties": {}}}, "$ref": "#/$defs/x"})")
                ["$defs"]["x"]["additionalProperties"],
            false);
}

// What the library would pass over in silence becomes what it reads.
TEST(JsonSchema, KeywordsBesideEachOtherAreMerged) {
  const auto of = [](const char* text) {
    nlohmann::json out = nlohmann::json::parse(checked_json_schema(text, "test"));
    out.erase("$defs");
    return out;
  };
  const auto expect = [&](const char* text, const char* expected) {
    EXPECT_EQ(of(text), nlohmann::json::parse(expected)) << text;
  };
  expect(R"({"minimum": 3})", R"({"type": "number", "minimum": 3})");
  expect(R"({"maxItems": 2, "minimum": 1})",
         R"({"type": ["array", "number"], "maxItems": 2, "minimum": 1, "items": true})");
  expect(R"({"allOf": [{"minimum": 1}, {"type": "integer", "minimum": 2, "maximum": 7},
                       {"type": ["number", "string"], "exclusiveMaximum": 5}], "multipleOf": 2})",
         R"({"type": "integer", "minimum": 2, "maximum": 7, "exclusiveMaximum": 5,
             "multipleOf": 2})");
  expect(
      R"({"type": "integer", "allOf": [{"minimum": 2, "maximum": 7}, {"minimum": 3, "maximum": 5},
                                          {"minimum": 1, "maximum": 9}]})",
      R"({"type": "integer", "minimum": 3, "maximum": 5})");
  expect(
      R"({"type": "array", "allOf": [{"minItems": 2, "maxItems": 7}, {"minItems": 3, "maxItems": 5},
                                        {"minItems": 1, "maxItems": 9}]})",
      R"({"type": "array", "minItems": 3, "maxItems": 5, "items": true})");
  expect(R"({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"})",
         R"({"type": "integer", "multipleOf": 12})");
  expect(
      R"({"$defs": {"a": {"type": "string", "title": "t"}}, "$ref": "#/$defs/a", "enum": ["x", 1]})",
      R"({"enum": ["x"]})");
  expect(R"({"const": 3, "type": "number", "minimum": 3})", R"({"const": 3})");
  expect(R"({"enum": ["a", 1, null, 7], "type": ["integer", "null"], "maximum": 5})",
         R"({"enum": [1, null]})");
  expect(R"({"enum": [1, 2, 3], "minimum": 2})", R"({"enum": [2, 3]})");
  expect(R"({"enum": [1, 2, 3], "maximum": 2})", R"({"enum": [1, 2]})");
  expect(R"({"enum": [1, 2, 3], "exclusiveMinimum": 2})", R"({"enum": [3]})");
  expect(R"({"enum": [1, 2, 3], "exclusiveMaximum": 2})", R"({"enum": [1]})");
  expect(R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {}},
             "allOf": [{"required": ["a"]},
                       {"properties": {"a": {"minimum": 2}, "b": {"const": 1}},
                        "additionalProperties": false}]})",
         R"({"type": "object", "required": ["a"], "additionalProperties": false,
             "properties": {"a": {"type": "integer", "minimum": 2}, "b": {"enum": [1]}}})");
  expect(R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
             "anyOf": [{"required": ["a"]}, {"type": "string"}, false]})",
         R"({"anyOf": [{"type": "object", "required": ["a"], "additionalProperties": false,
                        "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}]})");
  expect(R"({"allOf": [{"prefixItems": [{"type": "integer"}]}, {"items": {"minimum": 1}}]})",
         R"({"type": "array", "prefixItems": [{"type": "integer", "minimum": 1}],
             "items": {"type": "number", "minimum": 1}})");
  expect(R"({"type": "object", "required": ["a", "b"], "additionalProperties": {"type": "null"},
             "properties": {"b": {"type": "boolean"}}})",
         R"({"type": "object", "required": ["a", "b"], "additionalProperties": {"type": "null"},
             "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}})");
  expect(R"({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}})",
         R"({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}})");
  // Conditions become alternatives; those that no value fits are left out.
  expect(R"({"type": "object", "required": ["k"], "properties": {"k": {"enum": ["a", "b", "c"]}},
             "if": {"properties": {"k": {"const": "a"}}},
             "then": {"properties": {"x": {"type": "null"}}, "required": ["x"]},
             "else": {"properties": {"y": {"type": "boolean"}}}})",
         R"({"anyOf": [
               {"type": "object", "required": ["k", "x"], "additionalProperties": false,
                "properties": {"k": {"enum": ["a"]}, "x": {"type": "null"}}},
               {"type": "object", "required": ["k"], "additionalProperties": false,
                "properties": {"k": {"enum": ["b", "c"]}, "y": {"type": "boolean"}}}]})");
  expect(R"({"type": "integer", "maximum": 9, "minimum": 0,
             "allOf": [{"if": {"minimum": 5}, "then": {"multipleOf": 5}},
                       {"if": {"maximum": 1}, "then": false}]})",
         R"({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 9, "exclusiveMinimum": 1,
                        "multipleOf": 5},
                       {"type": "integer", "minimum": 0, "maximum": 9, "exclusiveMinimum": 1,
                        "exclusiveMaximum": 5}]})");
  expect(R"({"type": "integer", "minimum": 3, "anyOf": [{"maximum": 2}, {"exclusiveMaximum": 3},
                                                        {"exclusiveMaximum": 4}]})",
         R"({"anyOf": [{"type": "integer", "minimum": 3, "exclusiveMaximum": 4}]})");
  expect(R"({"enum": [1, "x", null], "not": {"type": ["null", "string"]}})", R"({"enum": [1]})");
  expect(R"({"type": ["boolean", "null"], "not": {"const": true}})", R"({"enum": [null, false]})");
  expect(R"({"type": "integer", "minimum": 3, "not": {"enum": ["a", 1]}})",
         R"({"type": "integer", "minimum": 3})");
  expect(R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
             "not": {"required": ["a"]}})",
         R"({"type": "object", "properties": {"b": {"type": "null"}},
             "additionalProperties": false})");
  expect(R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
             "dependentRequired": {"a": ["b"]}})",
         R"({"anyOf": [{"type": "object", "properties": {"b": {"type": "null"}},
                        "additionalProperties": false},
                       {"type": "object", "required": ["a", "b"], "additionalProperties": false,
                        "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}]})");
  // Something that an array contains is at one of its places.
  expect(R"({"items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 2})",
         R"({"anyOf": [
               {"type": "array", "maxItems": 2, "minItems": 1, "items": {"type": "integer"},
                "prefixItems": [{"type": "integer", "minimum": 5}]},
               {"type": "array", "maxItems": 2, "minItems": 2, "items": {"type": "integer"},
                "prefixItems": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}]})");
  expect(R"({"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": false,
             "contains": {"const": true}})",
         R"({"anyOf": [{"type": "array", "minItems": 2, "items": false,
                        "prefixItems": [{"type": "null"}, {"enum": [true]}]}]})");
  // References by names become pointers.
  expect(R"({"$id": "http://x/a/b", "$ref": "c#/$defs/d",
             "$defs": {"e": {"$id": "c", "$defs": {"d": {"type": "null"}}}}})",
         R"({"$id": "http://x/a/b", "$ref": "#/$defs/e/$defs/d"})");
  expect(R"({"$ref": "#f", "$defs": {"e": {"$anchor": "f", "type": "null"}}})",
         R"({"$ref": "#/$defs/e"})");
  expect(R"({"items": {"$id": "http://y", "$ref": "#/$defs/g", "$defs": {"g": {"type": "null"}}},
             "type": "array"})",
         R"({"type": "array", "items": {"$id": "http://y", "$ref": "#/items/$defs/g",
             "$defs": {"g": {"type": "null"}}}})");
  // An optional property that cannot be is absent.
  expect(R"({"type": "object", "properties": {"a": false, "b": {"type": "null"}}})",
         R"({"type": "object", "properties": {"b": {"type": "null"}},
             "additionalProperties": false})");
  expect(R"({"type": "boolean", "uniqueItems": false, "then": {}, "minContains": 2})",
         R"({"type": "boolean"})");
}

}  // namespace
}  // namespace twell
