// SPDX-License-Identifier: Apache-2.0
#include "twell/serve/tool_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "twell/base/error.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

struct ReadCalls {
  std::string text;
  std::vector<std::pair<std::string, std::string>> calls;  // name, arguments
  friend bool operator==(const ReadCalls&, const ReadCalls&) = default;
};
std::ostream& operator<<(std::ostream& out, const ReadCalls& read) {
  out << '"' << read.text << '"';
  for (const auto& [name, arguments] : read.calls) out << " " << name << "(" << arguments << ")";
  return out;
}

ReadCalls read_pieces(ToolForm form, const std::vector<std::string>& pieces, int64_t most = 100) {
  ToolCallReader reader(form, {"f", "g"}, most);
  ReadCalls out;
  for (size_t i = 0; i <= pieces.size(); ++i) {
    const bool ends = i == pieces.size();
    const ToolCallReader::Found found = reader.push(ends ? "" : pieces[i], ends);
    out.text += found.text;
    for (const ToolCallPiece& piece : found.pieces) {
      if (!piece.name.empty()) {
        EXPECT_EQ(piece.call, std::ssize(out.calls));
        out.calls.emplace_back(piece.name, "");
      }
      EXPECT_EQ(piece.call, std::ssize(out.calls) - 1);
      if (!out.calls.empty()) out.calls.back().second += piece.arguments;
    }
  }
  EXPECT_EQ(reader.calls(), std::ssize(out.calls));
  return out;
}

const std::string kObject = R"({"a": "}<\"x", "b": [1, {"c": "]"}]})";
std::string call_of(const std::string& name, const char* key) {
  return "{\"name\": \"" + name + "\", \"" + key + "\": " + kObject + "}";
}

// The same whole, letter by letter, and cut anywhere.
TEST(ToolCalls, AreReadFromAnyPiecesOfAText) {
  using enum ToolForm;
  const std::string f = call_of("f", "arguments"), g = call_of("g", "arguments");
  const std::string lf = call_of("f", "parameters"), lg = call_of("g", "parameters");
  const struct {
    ToolForm form;
    std::string text;
    ReadCalls want;
  } cases[] = {
      {kHermes, "Hello < you", {"Hello < you", {}}},
      {kHermes, "<tool_call>\n" + f + "\n</tool_call>", {"", {{"f", kObject}}}},
      {kHermes,
       "I look.\n\n<tool_call>" + f + "</tool_call>\n<tool_call>\n" + g + "\n</tool_call>\n",
       {"I look.", {{"f", kObject}, {"g", kObject}}}},
      {kHermes,
       "<tool_call>\n{\"arguments\": {}, \"name\": \"other\"}\n</tool_call> done",
       {" done", {{"other", "{}"}}}},
      {kHermes, "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", {"", {{"f", "{}"}}}},
      {kHermes, "<tool_call>no</tool_call>", {"<tool_call>no</tool_call>", {}}},
      {kHermes, "<tool_call>{\"x\": 1}</tool_call>", {"<tool_call>{\"x\": 1}</tool_call>", {}}},
      {kHermes,
       "a <tool_call><tool_call>\n" + f + "\n</tool_call>",
       {"a <tool_call>", {{"f", kObject}}}},
      {kHermes, "a <tool_ca", {"a <tool_ca", {}}},
      {kHermes,
       "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"unf",
       {"", {{"f", "{\"a\": \"unf"}}}},
      {kHermes,
       "<tool_call>\n{\"name\": \"f\", \"argum",
       {"<tool_call>\n{\"name\": \"f\", \"argum", {}}},
      {kLlama3, lf, {"", {{"f", kObject}}}},
      {kLlama3, "<|python_tag|>" + lf, {"", {{"f", kObject}}}},
      {kLlama3, " " + lf + "; " + lg, {"", {{"f", kObject}, {"g", kObject}}}},
      {kLlama3, "{\"answer\": 1} and more", {"{\"answer\": 1} and more", {}}},
      {kLlama3,
       "{\"name\": \"Ada\", \"parameters\": {}}",
       {"{\"name\": \"Ada\", \"parameters\": {}}", {}}},
      {kLlama3, "Hello " + lf, {"Hello " + lf, {}}},
      {kMistral, "[TOOL_CALLS][" + f + ", " + g + "]", {"", {{"f", kObject}, {"g", kObject}}}},
      {kMistral, "[TOOL_CALLS] " + f, {"", {{"f", kObject}}}},
      {kMistral, "See [TOOL_CALLS] none", {"See [TOOL_CALLS] none", {}}},
      {kMistral, "a [1]", {"a [1]", {}}},
  };
  std::mt19937 random(1);
  for (const auto& one : cases) {
    EXPECT_EQ(read_pieces(one.form, {one.text}), one.want) << one.text;
    for (int round = 0; round < 20; ++round) {
      std::vector<std::string> pieces;
      for (size_t at = 0; at < one.text.size();) {
        const size_t size = round == 0 ? 1 : 1 + random() % 12;
        pieces.push_back(one.text.substr(at, size));
        at += size;
      }
      ASSERT_EQ(read_pieces(one.form, pieces), one.want) << one.text;
    }
  }
  EXPECT_EQ(
      read_pieces(kHermes, {"<tool_call>" + f + "</tool_call><tool_call>" + g + "</tool_call>"}, 1),
      (ReadCalls{"", {{"f", kObject}}}));
}

TEST(ToolCalls, ArgumentsAreSentWhileTheyGrow) {
  ToolCallReader reader(ToolForm::kHermes, {"f"}, 9);
  EXPECT_TRUE(reader.push("<tool_call>\n{\"name\": \"f\", ", false).pieces.empty());
  auto found = reader.push("\"arguments\": {\"a", false);
  ASSERT_EQ(found.pieces.size(), 1u);
  EXPECT_EQ(found.pieces[0].name, "f");
  EXPECT_EQ(found.pieces[0].arguments, "{\"a");
  found = reader.push("\": 1", false);
  ASSERT_EQ(found.pieces.size(), 1u);
  EXPECT_EQ(found.pieces[0].name, "");
  EXPECT_EQ(found.pieces[0].arguments, "\": 1");
}

// Where an answer must be a call, one that was cut off is neither a call nor a text.
TEST(ToolCalls, WhatWasCutOffIsNoTextWhereThereAreOnlyCalls) {
  const std::string call = R"(<tool_call>{"name": "f", "arguments": {}}</tool_call>)";
  for (const char* rest : {"<", "<tool_call>\n", "<tool_call>{\"name\": \"f\", \"arg", "\n"}) {
    for (const bool only_calls : {false, true}) {
      ToolCallReader first(ToolForm::kHermes, {"f"}, 9, only_calls);
      EXPECT_EQ(first.push(rest, true).text.empty(), only_calls) << rest;
      ToolCallReader second(ToolForm::kHermes, {"f"}, 9, only_calls);
      const auto found = second.push(call + rest, true);
      EXPECT_EQ(found.text.empty(), only_calls || std::string_view(rest) == "\n") << rest;
      EXPECT_EQ(found.pieces.size(), 1u);
      EXPECT_FALSE(second.is_cut());
    }
  }
}

TEST(ToolCalls, ACallThatEndsWithinItsArgumentsIsCut) {
  const std::string call = R"(<tool_call>{"name": "f", "arguments": {"a": 1})";
  for (const auto& [text, cut] :
       {std::pair(call, false),
        {call + "}</tool_call>", false},
        {call + "}<tool_call>", false},
        {call.substr(0, call.size() - 1), true},
        {call + "}</tool_call>" + call.substr(0, call.size() - 2), true}}) {
    ToolCallReader reader(ToolForm::kHermes, {"f"}, 9);
    reader.push(text, true);
    EXPECT_EQ(reader.is_cut(), cut) << text;
  }
}

// Also those of the other choices of a request.
TEST(ToolCalls, EveryCallHasAnIdOfItsOwn) {
  for (const ToolForm form : {ToolForm::kHermes, ToolForm::kMistral}) {
    const ToolCallIds ids(form);
    std::set<std::string> all;
    for (const size_t sequence : {0u, 1u, 2u, 127u}) {
      for (int64_t call = 0; call < 3; ++call) {
        const std::string id = ids.id(sequence, call);
        EXPECT_TRUE(all.insert(id).second) << id;
        EXPECT_EQ(id, ids.id(sequence, call));
        EXPECT_EQ(id.size(), form == ToolForm::kMistral ? 9u : 29u);
      }
    }
  }
}

TEST(ToolCalls, TheFormIsThatOfTheTemplate) {
  EXPECT_EQ(tool_form("{% for m in messages %}{{ m.content }}{% endfor %}"), std::nullopt);
  EXPECT_EQ(tool_form("{% if tools %}<tool_call>\n{\"name\": ...}\n</tool_call>{% endif %}"),
            ToolForm::kHermes);
  EXPECT_EQ(tool_form("{% if tools %}[TOOL_CALLS]{% endif %}"), ToolForm::kMistral);
  EXPECT_EQ(tool_form("{% if tools %}<|python_tag|>{% endif %}"), ToolForm::kLlama3);
  EXPECT_EQ(tool_form("{% if tools %}<tool_call><function=...>{% endif %}"), std::nullopt);
  EXPECT_EQ(tool_form("{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}"), std::nullopt);
}

// Texts by the grammar of calls are read as calls.
TEST(ToolCalls, TheirGrammarsGiveThem) {
  if (!GrammarCompiler::available()) GTEST_SKIP() << "built without XGrammar";
  const Tokenizer tokenizer = byte_tokenizer();
  GrammarCompiler compiler(tokenizer, {.end_tokens = {0}});
  const std::vector<Tool> tools = {
      {"f", R"({"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}, "required": ["a"],
                "$defs": {"d": {"type": "integer", "minimum": 0, "maximum": 9}}})",
       false},
      {"g", "", true}};
  const auto fits = [&](const GrammarText& grammar, const std::string& text) {
    const auto filter = compiler.compile(grammar).filter(std::vector<int32_t>{0});
    std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(tokenizer.vocab_size())));
    for (size_t i = 0; i < text.size(); ++i) {
      filter->allowed(mask);
      const int32_t id = tokenizer.find(text.substr(i, 1));
      if (!mask_allows(mask, id)) return false;
      filter->accept(i, id);
    }
    filter->allowed(mask);
    return mask_allows(mask, 0);
  };
  const auto one = [](const std::string& text, const char* name, const char* key,
                      const char* value) {
    return fmt::format(fmt::runtime(text),
                       fmt::format("{{\"name\": \"{}\", \"{}\": {}}}", name, key, value));
  };
  using enum ToolForm;
  const ToolCallLimits required{.choice = ToolChoice::kRequired};
  const ToolCallLimits single{.choice = ToolChoice::kRequired, .parallel = false};
  const std::string hermes = "<tool_call>\n{}\n</tool_call>";
  const std::string a = one(hermes, "f", "arguments", R"({"a": 3})"),
                    b = one(hermes, "g", "arguments", R"({"x": [1]})");
  EXPECT_TRUE(fits(*tool_grammar(kHermes, tools, required), a));
  EXPECT_TRUE(fits(*tool_grammar(kHermes, tools, required), a + "\n" + b));
  EXPECT_TRUE(fits(*tool_grammar(kHermes, tools, single), b));
  EXPECT_FALSE(fits(*tool_grammar(kHermes, tools, single), a + "\n" + b));
  EXPECT_FALSE(fits(*tool_grammar(kHermes, tools, required), ""));
  EXPECT_FALSE(
      fits(*tool_grammar(kHermes, tools, required), one(hermes, "f", "arguments", R"({"a": 30})")));
  EXPECT_FALSE(fits(*tool_grammar(kHermes, tools, required), one(hermes, "h", "arguments", "{}")));
  EXPECT_TRUE(
      fits(*tool_grammar(kLlama3, tools, required), one("{}", "f", "parameters", R"({"a": 3})")));
  EXPECT_TRUE(fits(*tool_grammar(kMistral, tools, required),
                   one("[TOOL_CALLS][{}]", "f", "arguments", R"({"a": 3})")));
  const std::string list = one("{}", "f", "arguments", R"({"a": 3})");
  EXPECT_TRUE(
      fits(*tool_grammar(kMistral, tools, required), "[TOOL_CALLS][" + list + ", " + list + "]"));
  EXPECT_FALSE(fits(*tool_grammar(kMistral, tools, required), "[TOOL_CALLS][]"));
  // Of a free answer, calls of strict tools validate, and without parallel calls there is one.
  EXPECT_EQ(tool_grammar(kHermes, {tools[0]}, {}), std::nullopt);
  EXPECT_EQ(tool_grammar(kLlama3, tools, {}), std::nullopt);
  EXPECT_EQ(tool_grammar(kHermes, tools, {.choice = ToolChoice::kNone}), std::nullopt);
  const GrammarText free = *tool_grammar(kHermes, tools, {});
  EXPECT_TRUE(fits(free, "Hello"));
  EXPECT_TRUE(fits(free, "Hello " + a + " " + b));
  EXPECT_FALSE(fits(free, one(hermes, "h", "arguments", "{}")));
  const GrammarText once = *tool_grammar(kHermes, {tools[0]}, {.parallel = false});
  EXPECT_TRUE(fits(once, "Hello " + a));
  EXPECT_FALSE(fits(once, a + a));
  // Mistral's list has one call then, and ends with its bracket.
  const GrammarText listed = *tool_grammar(kMistral, tools, {});
  const std::string call = one("[TOOL_CALLS][{}", "g", "arguments", "{}");
  EXPECT_TRUE(fits(listed, "See"));
  EXPECT_TRUE(fits(listed, "See " + call + "]"));
  EXPECT_FALSE(fits(listed, "See " + call));
  EXPECT_FALSE(fits(listed, call + "] and"));
  // Beside a format of texts an answer is either a text of it or calls.
  const GrammarText number{GrammarText::Kind::kJsonSchema, R"({"enum": [7, 8]})"};
  const GrammarText object{GrammarText::Kind::kJson, ""};
  const std::string llama = one("{}", "f", "parameters", R"({"a": 3})");
  const std::string mistral = "[TOOL_CALLS][" + list + "]";
  for (const auto& [form, calls] :
       {std::pair(kHermes, a), {kHermes, a + "\n" + b}, {kLlama3, llama}, {kMistral, mistral}}) {
    const GrammarText either = *tool_grammar(form, tools, {}, number);
    EXPECT_TRUE(fits(either, "7"));
    EXPECT_TRUE(fits(either, calls)) << calls;
    EXPECT_FALSE(fits(either, "9"));
    EXPECT_FALSE(fits(either, "7" + calls));
    EXPECT_FALSE(fits(either, "Hello"));
    EXPECT_FALSE(fits(either, ""));
    EXPECT_TRUE(fits(*tool_grammar(form, tools, {}, object), R"({"x": [1]})"));
    EXPECT_FALSE(fits(*tool_grammar(form, tools, required, number), "7"));
  }
  EXPECT_EQ(tool_grammar(kHermes, {}, {}, number), number);
  EXPECT_THROW(tool_grammar(kHermes, {{"f", R"({"not": {}})", false}}, required), InputError);
  EXPECT_NO_THROW(tool_grammar(kHermes, {{"f", R"({"not": {}})", false}}, {}));
}

}  // namespace
}  // namespace twell
