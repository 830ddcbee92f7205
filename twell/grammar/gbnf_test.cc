// SPDX-License-Identifier: Apache-2.0
#include "twell/grammar/gbnf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "twell/base/error.h"
#include "twell/grammar/grammar.h"
#include "twell/tokenizer/test_tokenizer.h"

namespace twell {
namespace {

using testing::HasSubstr;

constexpr int32_t kEndToken = 0;

struct Example {
  std::string grammar;
  std::vector<std::string> fit, do_not;
};

class Gbnf : public testing::Test {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::available()) GTEST_SKIP() << "built without XGrammar";
  }
  bool fits(const Grammar& grammar, const std::string& text) const {
    const std::unique_ptr<TokenFilter> filter = grammar.filter(std::vector<int32_t>{kEndToken});
    std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(tokenizer_.vocab_size())));
    for (size_t i = 0; i < text.size(); ++i) {
      const int32_t id = tokenizer_.find(text.substr(i, 1));
      filter->allowed(mask);
      if (!mask_allows(mask, id)) return false;
      filter->accept(i, id);
    }
    filter->allowed(mask);
    return mask_allows(mask, kEndToken);
  }
  std::string refusal(const std::string& grammar) {
    try {
      compiler_.compile({GrammarText::Kind::kEbnf, grammar});
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }

  Tokenizer tokenizer_ = byte_tokenizer();
  GrammarCompiler compiler_{tokenizer_, {.end_tokens = {kEndToken}}};
};

// What llama.cpp's own grammars are made of.
TEST_F(Gbnf, IsReadAsLlamaCppReadsIt) {
  const Example examples[] = {
      {R"(root   ::= value
value  ::= object | string | number | ("true" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
# Blanks, or none
ws ::= | " " | "\n" [ \t]{0,20}
)",
       {"{}", "{\"a\":1}", "{ \"a\": {\"b\": -2.5},\n  \"c\":null}", "\"\\u00e9\\n\"", "12 "},
       {"{", "{\"a\":}", "{  }", "\"\\x\"", "01"}},
      {"root ::= ", {""}, {"a"}},
      {"root ::= \"a\" | ", {"", "a"}, {"b"}},
      {"root ::= x \"c\"\nx ::= \"a\" | | \"b\" # empty |\n", {"ac", "bc", "c"}, {"abc", ""}},
      {"root ::= x \"c\"\nx ::= # nothing\n\ny ::= \"b\"", {"c"}, {"bc"}},
      {"root ::= (\"a\" | ) (| \"b\") () \"c\"", {"c", "ac", "bc", "abc"}, {"bac"}},
      {"root ::= . \"b\" .{2}", {"ab12", "éb\n€"}, {"b12", "ab1", "ab123"}},
      {"root ::= ...", {"abc"}, {"ab", "abcd"}},
      {"root ::= x.y\nx ::= \"a\"\ny ::= \"b\"", {"a.b", "a\nb"}, {"ab"}},
      {"root ::= x.y\nx.y ::= \"a\"", {"a"}, {"a.b"}},
      {"root ::= \"a\"?* \"b\"{2}+ (\"c\" \"d\")*?",
       {"bb", "aabbbb", "bbcdcd"},
       {"b", "bbb", "bbc"}},
      {"root ::= true-0 true 0-1\ntrue-0 ::= \"a\"\ntrue ::= \"b\"\n0-1 ::= \"c\"",
       {"abc"},
       {"ab"}},
      {"root ::= \"#\" [#|(] \"|\" # \"x\n \"y\"", {"##|y", "#(|y"}, {"##|"}},
      {"root ::= \"a\" |\n  \"b\"\n  | \"c\"", {"a", "b", "c"}, {""}},
      {R"(root ::= [\]\[\\^-] "\"\x41\u00e9\U0001F600")", {"]\"Aé😀", "-\"Aé😀"}, {"a\"Aé😀"}}};
  for (const Example& example : examples) {
    const std::string why = refusal(example.grammar);
    ASSERT_EQ(why, "") << example.grammar;
    const Grammar grammar = compiler_.compile({GrammarText::Kind::kEbnf, example.grammar});
    for (const std::string& text : example.fit) {
      EXPECT_TRUE(fits(grammar, text)) << example.grammar << ": " << text;
    }
    for (const std::string& text : example.do_not) {
      EXPECT_FALSE(fits(grammar, text)) << example.grammar << ": " << text;
    }
  }
}

// Brackets in texts, classes and comments are no nesting, and a message names the line of the text
// that was given.
TEST_F(Gbnf, RefusalsNameTheLine) {
  std::string texts = "root ::= x", nested = "root ::= ", repeated = "root ::= \"a\"";
  for (int i = 0; i < 80; ++i) texts += " \"({[\" [([{]";
  for (int i = 0; i < 65; ++i) nested += "(";
  EXPECT_EQ(refusal(texts + "# " + std::string(80, '(') + "\nx ::= \"a\""), "");
  EXPECT_THAT(refusal(nested), HasSubstr("more than 64 deep"));
  EXPECT_THAT(refusal(repeated + "*****"), HasSubstr("more than 4 times"));
  EXPECT_THAT(refusal("root ::= | x\n\nx ::= ( | \"a\"\n"), HasSubstr("line 4"));
  EXPECT_THAT(refusal("root ::= |\n  missing"), HasSubstr("line 2"));
  for (const char* broken : {"root ::= \"a", "root ::= [a", "root ::= )", "root",
                             "::=", "root ::= *", "|", "(", "root ::= {"}) {
    EXPECT_NE(refusal(broken), "") << broken;
  }
}

// What XGrammar's own EBNF has beyond it stays as it is.
TEST(GbnfText, KeepsWhatIsNoGbnf) {
  for (const char* text : {"root ::= \"a\" x (= \"b\")\nx[max_tokens=3] ::= [a-z]+\n",
                           "root ::= TagDispatch((\"a\", x), loop=true)\nx ::= \"b\"",
                           "root ::= \"a.b\" # . |\n", "root ::= 'a' <[5]>", ""}) {
    EXPECT_EQ(ebnf_of_gbnf(text), text);
  }
}

}  // namespace
}  // namespace twell
