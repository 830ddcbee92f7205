// SPDX-License-Identifier: Apache-2.0
// Compares with transformers' renderer; golden values: tests/golden/make_chat_golden.py.
#include "twell/chat_template/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/test_folder.h"
#include "twell/chat_template/jinja/parser.h"
#include "twell/chat_template/jinja/renderer.h"

namespace twell {
namespace {

using ::testing::HasSubstr;

ChatTemplate make(const std::string& text) {
  return ChatTemplate::parse(R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}})", "here",
                             text);
}

// The rendered text, or the error message.
std::string render(const std::string& text, const std::string& messages = "[]") {
  try {
    return make(text).render_json(messages, false);
  } catch (const InputError& error) {
    return std::string("refused: ") + error.what();
  }
}

TEST(ChatTemplate, RendersAsTransformersDoes) {
  // ordered_json, because templates see the file's order of keys.
  const auto golden = nlohmann::ordered_json::parse(
      read_file(std::filesystem::path(TWELL_SOURCE_DIR) / "tests" / "golden" / "chat.json"));
  int64_t compared = 0;
  for (const auto& [name, text] : golden["templates"].items()) {
    const ChatTemplate chat = make(text);
    for (size_t i = 0; i < golden["conversations"].size(); ++i) {
      const std::string messages = golden["conversations"][i].dump();
      for (const bool prompt : {false, true}) {
        const auto& expected = golden["texts"][name][i][prompt ? 1 : 0];
        SCOPED_TRACE(testing::Message() << name << " conversation " << i << " prompt " << prompt);
        if (expected.is_null()) {
          EXPECT_THROW(chat.render_json(messages, prompt), InputError);
        } else {
          EXPECT_EQ(chat.render_json(messages, prompt), expected.get<std::string>());
        }
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 72);
}

TEST(ChatTemplate, TextThatIsNotUtf8IsRefused) {
  EXPECT_THAT(render("{{ '\x80\x81z'[1] }}"), HasSubstr("here: the template is not UTF-8"));
}

// Golden values: tests/golden/make_template_golden.py. A null text: jinja2 refuses the template.
TEST(ChatTemplate, RendersEveryFeatureAsJinja2Does) {
  const auto golden = nlohmann::ordered_json::parse(
      read_file(std::filesystem::path(TWELL_SOURCE_DIR) / "tests" / "golden" / "template.json"));
  auto variables = golden["variables"];
  const std::string messages = variables["messages"].dump();
  variables.erase("messages");
  const std::string others = variables.dump();
  int64_t compared = 0;
  for (const auto& test : golden["cases"]) {
    const std::string text = test["template"].get<std::string>();
    if (text.empty()) continue;
    std::string outcome;
    try {
      outcome = make(text).render({.messages = messages, .variables = others});
    } catch (const InputError& error) {
      outcome = std::string("refused: ") + error.what();
    }
    if (test["text"].is_null()) {
      EXPECT_THAT(outcome, ::testing::StartsWith("refused: here")) << text;
    } else {
      EXPECT_EQ(outcome, test["text"].get<std::string>()) << text;
    }
    ++compared;
  }
  EXPECT_GE(compared, 280);
}

TEST(ChatTemplate, WhatIsNotSupportedIsNamedWithItsLine) {
  EXPECT_EQ(render("a\n{% include 'x' %}"),
            "refused: here: line 2: the statement 'include' is not supported");
  EXPECT_EQ(render("{% if true %}\n{{ 'a' | urlize }}{% endif %}"),
            "refused: here: line 2: the filter 'urlize' is not supported");
  EXPECT_EQ(render("a\n{{ 'a' | nope }}"),
            "refused: here: line 2: there is no filter named 'nope'");
  EXPECT_EQ(render("{{ 1 is nope(2) }}"), "refused: here: line 1: there is no test named 'nope'");
  EXPECT_EQ(render("{% do x %}"), "refused: here: line 1: there is no statement 'do'");
  EXPECT_THAT(render("{{ 'a'.encode('utf-8') }}"), HasSubstr("encode, translate and maketrans"));
  EXPECT_THAT(render("{{ 'a'.nope() }}"), HasSubstr("line 1: 'nope' is undefined"));
  EXPECT_THAT(render("{{ [].append(1) }}"), HasSubstr("'append' would change a value"));
  EXPECT_THAT(render("{{ lipsum() }}"), HasSubstr("the function 'lipsum' is not supported"));
  EXPECT_EQ(render("{{ raise_exception('no\nway') }}"),
            "refused: here: line 1: the template says: no way");
}

TEST(ChatTemplate, AnArgumentThatIsNotKnownIsAnError) {
  EXPECT_EQ(render("{{ 'a' | trim(characters='x') }}"),
            "refused: here: line 1: the filter 'trim' knows no argument 'characters'");
  EXPECT_EQ(render("{{ 'a' | upper('x') }}"),
            "refused: here: line 1: the filter 'upper' takes 0 arguments, not 1");
  EXPECT_EQ(render("{{ 'a' | replace('x') }}"),
            "refused: here: line 1: the filter 'replace' lacks the argument 'new'");
  EXPECT_EQ(render("{{ 'a' | default('x', default_value='y') }}"),
            "refused: here: line 1: the filter 'default' is given 'default_value' twice");
  EXPECT_EQ(render("{{ 1 is divisibleby(2, 3) }}"),
            "refused: here: line 1: the test 'divisibleby' takes 1 arguments, not 2");
  EXPECT_THAT(render("{{ ''.split(separator=',') }}"), HasSubstr("split knows no argument"));
  EXPECT_THAT(render("{% macro m(a) %}{% endmacro %}{{ m(b=1) }}"),
              HasSubstr("the macro 'm' has no parameter 'b'"));
}

TEST(ChatTemplate, TakesToolsDocumentsAndVariables) {
  const ChatTemplate chat =
      make("{{ tools | tojson }}{{ documents | length }}{{ x }}{{ add_generation_prompt }}");
  EXPECT_EQ(chat.render({.messages = "[]",
                         .tools = R"([{"b": 1, "a": 12345678901234567890}])",
                         .documents = "[{}]",
                         .variables = R"({"x": "y", "messages": 3})",
                         .add_generation_prompt = false}),
            R"([{"b": 1, "a": 12345678901234567890}]1yFalse)");
  EXPECT_EQ(make("{{ tools is none }}{{ documents is none }}").render({.messages = "[]"}),
            "TrueTrue");
  EXPECT_THROW(chat.render({.messages = "{}"}), InputError);
  EXPECT_THROW(chat.render({.messages = "[]", .tools = "{}"}), InputError);
  EXPECT_THROW(chat.render({.messages = "[]", .variables = "[]"}), InputError);
  EXPECT_THROW(chat.render({.messages = "[1,"}), InputError);
}

TEST(ChatTemplate, BrokenOnesAreRefusedInOneLine) {
  for (const char* text : {"{{",
                           "{% if %}",
                           "{% if true %}",
                           "{% endif %}",
                           "{{ 'a }}",
                           "{{ 1 + }}",
                           "{# x",
                           "{% for x %}{% endfor %}",
                           "{{ [1, 2 }}",
                           "{{ a.b.c }}",
                           "{{ 1 < 'a' }}",
                           "{{ 1 // 0 }}",
                           "{{ {'a': 1}['b']['c'] }}",
                           "{% set a.b = 1 %}",
                           "{{ range(1000000000) }}",
                           "{{ @ }}",
                           "{{ 10 ** 40 }}",
                           "{{ 'a'[::0] }}",
                           "{{ 'a' | map('x') | list }}",
                           "{% for a, b in [1] %}{% endfor %}"}) {
    const std::string outcome = render(text);
    EXPECT_THAT(outcome, ::testing::StartsWith("refused: here")) << text;
    EXPECT_THAT(outcome, ::testing::Not(HasSubstr("\n"))) << text;
  }
}

TEST(ChatTemplate, DepthIsBounded) {
  const auto repeat = [](std::string_view part, int count = 2'000) {
    std::string out;
    for (int i = 0; i < count; ++i) out += part;
    return out;
  };
  for (const std::string& text : {
           "{{ " + repeat("(", 20'000) + "1" + repeat(")", 20'000) + " }}",
           "{{ " + repeat("not ") + "1 }}",
           "{{ " + repeat("-") + "1 }}",
           "{{ " + repeat("[") + repeat("]") + " }}",
           "{{ " + repeat("{'a': ") + "1" + repeat("}") + " }}",
           "{{ " + repeat("f(") + repeat(")") + " }}",
           "{{ " + repeat("x[") + "0" + repeat("]") + " }}",
           repeat("{% if true %}"),
           repeat("{% for x in y %}"),
       }) {
    EXPECT_THAT(render(text), HasSubstr("nested too deeply")) << text.substr(0, 40);
  }
  for (const std::string& text :
       {"{{ 1" + repeat("+1") + " }}", "{{ 1" + repeat("*1") + " }}",
        "{{ 1" + repeat(" and 1") + " }}", "{{ 1" + repeat(" or 1") + " }}",
        "{{ 1" + repeat(" if 1") + " }}", "{{ x" + repeat(".a") + " }}",
        "{{ x" + repeat("[0]") + " }}", "{{ x" + repeat("[:]") + " }}",
        "{{ x" + repeat("()") + " }}", "{{ x" + repeat("|d") + " }}"}) {
    EXPECT_THAT(render(text), HasSubstr("an expression of too many terms")) << text.substr(0, 40);
  }
  EXPECT_EQ(render("{{ 1" + repeat("+1", 300) + " }}"), "301");
  EXPECT_EQ(render("{{ 1" + repeat("~1") + " }}"), "1" + repeat("1"));
  EXPECT_EQ(render("{{ 1" + repeat(" == 1") + " }}"), "True");
  EXPECT_EQ(render("{% if 0 %}" + repeat("{% elif 0 %}") + "{% else %}x{% endif %}"), "x");
  EXPECT_THAT(render("{% set n = namespace(x=1) %}{% for i in range(10000) %}{% set n.x = [n.x] %}"
                     "{% endfor %}{{ n.x }}"),
              HasSubstr("a value is nested more than 500 deep"));
  EXPECT_THAT(render("{{ messages }}", repeat("[") + repeat("]")), HasSubstr("nested more than"));
  for (const char* text :
       {"{% set n = namespace() %}{% set n.x = n %}{{ n.x.x }}",
        "{% set n = namespace() %}{% set n.x = [n] %}{{ n.x | string | length }}",
        "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}"
        "{% endcall %}{% endmacro %}{{ n() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"}) {
    EXPECT_THAT(render(text), HasSubstr("nests calls more than 1500 deep")) << text;
  }
  for (const char* grown : {"n.x | map('string')", "n.x | select", "{'k': n.x}.items()", "n.x, n.x",
                            "n.x | batch(1)", "{'k': n.x}.items"}) {
    EXPECT_THAT(render(fmt::format("{{% set n = namespace(x=['a']) %}}{{% for i in range(10000) %}}"
                                   "{{% set n.x = {} %}}{{% endfor %}}",
                                   grown)),
                HasSubstr("a value is nested more than 500 deep"))
        << grown;
  }
}

// The same within other limits than those of ChatTemplate.
std::string render_within(const jinja::RenderLimits& limits, const std::string& text) {
  try {
    return jinja::render(jinja::parse_template(text, "here"), {}, "here", limits);
  } catch (const InputError& error) {
    return std::string("refused: ") + error.what();
  }
}

TEST(ChatTemplate, StepsAreBounded) {
  const jinja::RenderLimits limits{.steps = 100'000};
  std::string loops;
  for (int i = 0; i < 6; ++i) loops = "{% for i in range(100) %}" + loops + "{% endfor %}";
  EXPECT_THAT(render_within(limits, loops), HasSubstr("does not come to an end in 100000 steps"));
  EXPECT_THAT(render_within(limits,
                            "{% set n = namespace(x=[]) %}{% for i in range(60) %}"
                            "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x == n.x }}"),
              HasSubstr("does not come to an end"));
  EXPECT_EQ(render_within(limits, "{% for i in range(20000) %}{% endfor %}"), "");
}

TEST(ChatTemplate, BytesAreBounded) {
  const std::string doubling = "{% set n = namespace(x='ab', y=[1]) %}{% for i in range(60) %}";
  for (const std::string& text : {
           std::string("{{ 'a' * 1000000000 }}"),
           std::string("{{ 'abcd' * 4611686018427387904 }}"),
           std::string("{{ [1] | tojson(indent=1900000000) }}"),
           std::string("{{ [[[[1]]]] | tojson(indent=9223372036854775807) }}"),
           doubling + "{% set n.x = n.x ~ n.x %}{% endfor %}",
           doubling + "{% set n.x = n.x + n.x %}{% endfor %}",
           doubling + "{% set n.y = n.y + n.y %}{% endfor %}",
           doubling + "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
           doubling + "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
           doubling + "{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
           doubling + "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
           doubling + "{% set n.x = [n.x, n.x] | string %}{% endfor %}",
           doubling + "{% set n.x = [n.x, n.x] | tojson %}{% endfor %}",
           // A failing search for a long text must be linear, and repeated ones must be bounded.
           std::string("{% set x = 'a' * 800000 %}{{ ('a' * 400000 ~ 'b') in x }}"
                       "{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}"),
       }) {
    const std::string outcome = render_within({.bytes = 4 << 20}, text);
    EXPECT_THAT(outcome,
                ::testing::AnyOf(HasSubstr("handles more than 4 MiB"), HasSubstr("is too long")))
        << text << outcome.substr(0, 100);
  }
  EXPECT_THAT(render("{{ range(-9223372036854775807, 9223372036854775807) }}"),
              HasSubstr("is too long"));
  EXPECT_EQ(
      render("{{ range(-9223372036854775807, 9223372036854775807, 9223372036854775807) | list }}"),
      "[-9223372036854775807, 0]");
}

TEST(ChatTemplate, ArithmeticAtTheEndsOfTheIntegers) {
  EXPECT_EQ(render("{{ 'abc'[1::9223372036854775807] }}{{ [1, 2][1::9223372036854775807] }}"),
            "b[2]");
  EXPECT_EQ(render("{{ 'abc'[::-9223372036854775807 - 1] }}"), "c");
  EXPECT_EQ(render("{{ 'abc'[-9223372036854775807 - 1:9223372036854775807] }}"), "abc");
  EXPECT_EQ(render("{{ 9223372036854775806 % 9223372036854775807 }}"), "9223372036854775806");
  EXPECT_EQ(render("{{ (-9223372036854775807 - 1) // 3 }}"), "-3074457345618258603");
  EXPECT_EQ(render("{{ 9223372036854775807 + 1 }}"), "9223372036854775808");
  EXPECT_EQ(render("{{ (-9223372036854775807 - 1) // -1 }}"), "9223372036854775808");
  EXPECT_THAT(render("{{ (-2 ** 127) // -1 }}"), HasSubstr("too large"));
  EXPECT_THAT(render("{{ 2 ** 127 }}"), HasSubstr("too large"));
  EXPECT_THAT(render("{{ 1e300 | int }}"), HasSubstr("too large"));
}

// Python rounds halves to the even neighbour, and its 0 keeps its sign.
TEST(ChatTemplate, RoundsAndDividesAsPythonDoes) {
  EXPECT_EQ(render("{{ 25.0 | round(-1) }} {{ 35.0 | round(-1) }} {{ -25.0 | round(-1) }}"),
            "20.0 40.0 -20.0");
  EXPECT_EQ(render("{{ 0.0 // -1 }} {{ -0.0 // 1 }} {{ 0.5 // 1 }} {{ -0.5 // 1 }}"),
            "-0.0 -0.0 0.0 -1.0");
}

// Four times the input takes about four times as long, not sixteen times.
TEST(ChatTemplate, LongInputsTakeLinearTime) {
  const auto seconds = [](const std::function<void()>& run) {
    const std::clock_t begin = std::clock();
    run();
    return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  const auto of_size = [&](int size) {
    std::string keys = "[{", list = "[0", sets, ifs;
    for (int i = 0; i < 20 * size; ++i) keys += fmt::format("\"k{}\": {}, ", i, i);
    keys += "\"last\": 1}]";
    for (int i = 0; i < 50 * size; ++i) list += ", {}";
    list += "]";
    for (int i = 0; i < size; ++i) {
      sets += fmt::format("{{% set v{} = 1 %}}", i);
      ifs += fmt::format("{{% if v{} %}}{{% set w{} = 1 %}}{{% endif %}}", i, i);
    }
    const std::string raws(static_cast<size_t>(100 * size), '{');
    const std::string letters =
        fmt::format("{{{{ ('a' * {0})[{0} - 1] }}}}{{{{ ('é' * {0})[-1] }}}}", 200 * size);
    const std::string count = "{{ messages[0] | length }}{{ messages[0].k77 }}";
    return std::array{
        seconds([&] { EXPECT_EQ(render(count, keys), fmt::format("{}77", 20 * size + 1)); }),
        seconds([&] {
          EXPECT_EQ(render("{{ messages | length }}", list), fmt::format("{}", 50 * size + 1));
        }),
        seconds([&] { EXPECT_EQ(render(sets + ifs + "{{ w77 }}"), "1"); }), seconds([&] {
          EXPECT_EQ(render("{% raw %}" + raws + "{% endraw %}").size(), raws.size());
        }),
        seconds([&] { EXPECT_EQ(render(letters), "aé"); })};
  };
  const auto few = of_size(600), many = of_size(2'400);
  for (size_t i = 0; i < few.size(); ++i) {
    EXPECT_LT(many[i], 10 * few[i] + 0.1) << i << ": " << few[i] << " s, " << many[i] << " s";
  }
}

TEST(ChatTemplate, IsFoundInTheFolder) {
  const TempFolder folder;
  EXPECT_THROW(ChatTemplate::load(folder.path()), InputError);
  folder.write("tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  EXPECT_THROW(ChatTemplate::load(folder.path()), InputError) << "no template";
  folder.write("tokenizer_config.json", R"({"eos_token": "<|im_end|>", "chat_template": [
      {"name": "tool_use", "template": "T"},
      {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]})");
  const ChatTemplate chat = ChatTemplate::load(folder.path());
  EXPECT_EQ(chat.eos_token(), "<|im_end|>");
  EXPECT_EQ(chat.render({{"user", "a\"b"}}, true), "a\"b<|im_end|>");
  folder.write("chat_template.jinja", "{{ messages[0].role }}\n");
  EXPECT_EQ(ChatTemplate::load(folder.path()).render({{"user", "x"}}, true), "user");
}

TEST(ChatTemplate, OfSeveralTheOneForToolsIsPicked) {
  const TempFolder folder;
  folder.write("tokenizer_config.json", R"({"chat_template": [
      {"name": "tool_use", "template": "T{{ tools | length }}"},
      {"name": "default", "template": "D{{ eos_token }}"}]})");
  folder.write("special_tokens_map.json", R"({"eos_token": {"content": "<eos>"}})");
  const ChatTemplate listed = ChatTemplate::load(folder.path());
  EXPECT_EQ(listed.render({.messages = "[]"}), "D<eos>");
  EXPECT_EQ(listed.render({.messages = "[]", .tools = "[]"}), "T0");
  EXPECT_EQ(listed.eos_token(), "<eos>");
  EXPECT_EQ(listed.tool_template(), "T{{ tools | length }}");
  folder.write("chat_template.json", R"({"chat_template": "J"})");
  EXPECT_EQ(ChatTemplate::load(folder.path()).render({.messages = "[]", .tools = "[]"}), "J");
  folder.write("chat_template.jinja", "F");
  std::filesystem::create_directory(folder.path() / "additional_chat_templates");
  folder.write("additional_chat_templates/tool_use.jinja", "{% nope %}");
  const ChatTemplate files = ChatTemplate::load(folder.path());
  EXPECT_EQ(files.render({.messages = "[]"}), "F");
  try {
    files.render({.messages = "[]", .tools = "[]"});
    FAIL() << "a template that cannot be used";
  } catch (const InputError& error) {  // without the folder, because clients read it
    EXPECT_STREQ(error.what(), "tool_use.jinja: line 1: there is no statement 'nope'");
  }
}

}  // namespace
}  // namespace twell
