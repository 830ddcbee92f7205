// SPDX-License-Identifier: Apache-2.0
// Chat templates against transformers' renderer. Golden values: tests/golden/make_chat_golden.py.
#include "twell/chat_template/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/file.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

using ::testing::HasSubstr;

ChatTemplate make(const std::string& text) {
  return ChatTemplate::parse(R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}})", "here",
                             text);
}

// The text, or the error's.
std::string render(const std::string& text, const std::string& messages = "[]") {
  try {
    return make(text).render_json(messages, false);
  } catch (const InputError& error) {
    return std::string("refused: ") + error.what();
  }
}

TEST(ChatTemplate, RendersAsTransformersDoes) {
  // In the order of the file: dictionaries keep theirs.
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

TEST(ChatTemplate, CutsTextThatIsNotUtf8) {
  EXPECT_EQ(render("{{ '\x80\x81z'[1] }}{{ '\x80\x81z'[1:] }}"), "zz");
}

TEST(ChatTemplate, WhatIsNotSupportedIsNamedWithItsLine) {
  EXPECT_EQ(render("a\n{% macro f() %}"),
            "refused: here: line 2: the statement 'macro' is not supported");
  EXPECT_EQ(render("{{ 'a' | slice(3) }}"),
            "refused: here: line 1: the filter 'slice' is not supported");
  EXPECT_EQ(render("{{ 1 is divisibleby(2) }}"),
            "refused: here: line 1: the test 'divisibleby' is not supported");
  EXPECT_THAT(render("{{ 'a'.zfill(3) }}"), HasSubstr("the method 'zfill' of a is not supported"));
  EXPECT_THAT(render("{{ lipsum() }}"), HasSubstr("the function 'lipsum' is not supported"));
  EXPECT_THAT(render("{% import 'x' %}"), HasSubstr("the statement 'import'"));
  EXPECT_EQ(render("{% if false %}{{ 1 | nope }}{% endif %}ok"), "ok") << "never met";
  EXPECT_THAT(render("{{ raise_exception('no') }}"), HasSubstr("line 1: the template says: no"));
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
                           "{{ 9223372036854775807 + 1 }}",
                           "{{ 'a'[::0] }}",
                           "{{ messages | map('x') }}",
                           "{% for a, b in [1] %}{% endfor %}"}) {
    const std::string outcome = render(text);
    EXPECT_THAT(outcome, ::testing::StartsWith("refused: here")) << text;
    EXPECT_THAT(outcome, ::testing::Not(HasSubstr("\n"))) << text;
  }
}

TEST(ChatTemplate, HostileOnesAreBounded) {
  const std::string open(100'000, '('), close(100'000, ')');
  EXPECT_THAT(render("{{ " + open + "1" + close + " }}"), HasSubstr("nested too deeply"));
  std::string ifs, nots = "{{ ";
  for (int i = 0; i < 10'000; ++i) {
    ifs += "{% if true %}";
    nots += "not ";
  }
  EXPECT_THAT(render(ifs), HasSubstr("nested too deeply"));
  EXPECT_THAT(render(nots + "1 }}"), HasSubstr("nested too deeply"));
  std::string loops;
  for (int i = 0; i < 6; ++i) {
    loops = "{% for i in range(100) %}" + loops + "{% endfor %}";
  }
  EXPECT_THAT(render(loops), HasSubstr("does not come to an end"));
  EXPECT_THAT(render("{{ 'a' * 100000000 }}"), HasSubstr("too long"));
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

}  // namespace
}  // namespace twell
