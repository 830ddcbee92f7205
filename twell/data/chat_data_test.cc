// SPDX-License-Identifier: Apache-2.0
#include "twell/data/chat_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <numeric>
#include <set>

#include "twell/base/error.h"
#include "twell/base/test_folder.h"

namespace twell {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kTurns =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

class ChatDataTest : public testing::Test {
 protected:
  static Tokenizer learn() {
    BpeTrainingOptions options;
    options.vocab_size = 290;
    options.special_tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    int left = 4;
    return train_bpe(options, [&](std::string& text) {
      text = "user asks and the assistant answers: one and two are three, yes or no\n";
      return left-- > 0;
    });
  }
  static ChatTemplate chat(const std::string& text = kTurns) {
    return ChatTemplate::from_files(
        {{"chat_template.jinja", text},
         {"tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})"}});
  }
  ChatDataOptions written(const std::vector<std::string>& lines, int64_t length = 64) {
    const fs::path file = temp_.path() / "talks.jsonl";
    std::ofstream out(file);
    for (const std::string& line : lines) out << line << "\n";
    return {.file = file, .length = length, .log = [this](LogLevel, std::string_view message) {
              log_ += std::string(message) + "\n";
            }};
  }
  std::unique_ptr<ChatData> read(const ChatDataOptions& options,
                                 const ChatTemplate& chat = ChatDataTest::chat()) {
    return std::make_unique<ChatData>(ctx_, chat, tokenizer_, options);
  }
  std::string fault(const ChatDataOptions& options,
                    const ChatTemplate& chat = ChatDataTest::chat()) {
    try {
      read(options, chat);
    } catch (const InputError& error) {
      return error.what();
    }
    return "none";
  }
  // The documents of a split: their inputs, and what is learned of them.
  struct Document {
    std::string text, learned;
    bool operator==(const Document&) const = default;
  };
  std::vector<Document> documents(const ChatData& data, Split split, int64_t length = 64) {
    std::vector<Document> out;
    for (int64_t s = 0; s < data.sequences(split, length); ++s) {
      std::vector<int32_t> inputs(static_cast<size_t>(length)), targets(inputs);
      data.read_sequence(split, s, inputs, targets);
      std::vector<int64_t> lengths;
      data.add_documents(split, s, inputs, lengths);
      EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), length);
      EXPECT_EQ(std::ranges::count_if(targets, [](int32_t id) { return id >= 0; }),
                data.targets(split, s, length));
      size_t at = 0;
      for (const int64_t count : lengths) {
        std::vector<int32_t> ids, learned;
        for (int64_t i = 0; i < count; ++i, ++at) {
          ids.push_back(inputs[at]);
          if (targets[at] < 0) continue;
          learned.push_back(targets[at]);
          // The target is the token that follows.
          if (i + 1 < count) {
            EXPECT_EQ(targets[at], inputs[at + 1]);
          }
        }
        out.push_back({tokenizer_.decode(ids), tokenizer_.decode(learned)});
      }
    }
    return out;
  }

  TempFolder temp_;
  Context ctx_{2};
  const Tokenizer tokenizer_ = learn();
  std::string log_;
};

std::string question_and_answer(const std::string& question, const std::string& answer) {
  return R"({"messages": [{"role": "user", "content": ")" + question +
         R"("}, {"role": "assistant", "content": ")" + answer + R"("}]})";
}

TEST_F(ChatDataTest, LearnsAnswersWithTheirEndsAlone) {
  const auto data = read(written(
      {R"({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one?"}, )"
       R"({"role": "assistant", "content": "yes"}, {"role": "user", "content": "two?"}, )"
       R"({"role": "assistant", "content": "no, two"}, {"role": "user", "content": "thanks"}]})"},
      128));
  EXPECT_THAT(data->counts().conversations, ElementsAre(1, 0));
  EXPECT_THAT(data->end_tokens(), ElementsAre(tokenizer_.find("<|im_end|>")));
  const std::vector<Document> found = documents(*data, Split::kTrain, 128);
  ASSERT_GE(found.size(), 1u);
  EXPECT_EQ(found[0].learned, "yes<|im_end|>no, two<|im_end|>");
  // The last token is a target alone.
  EXPECT_EQ(found[0].text,
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none?<|im_end|>\n"
            "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n"
            "<|im_start|>assistant\nno, two");
  // The rest of the sequence repeats it, and nothing is learned there.
  for (size_t i = 1; i < found.size(); ++i) {
    EXPECT_EQ(found[i].learned, "");
    EXPECT_TRUE(found[0].text.starts_with(found[i].text));
  }
}

TEST_F(ChatDataTest, PromptAndCompletion) {
  const auto data = read(written(
      {R"({"prompt": "one?", "completion": "yes"})",
       R"({"prompt": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "no"}, )"
       R"({"role": "user", "content": "why"}], "completion": [{"role": "assistant", "content": "so"}]})"}));
  std::string learned;
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    for (const Document& document : documents(*data, split)) learned += document.learned;
  }
  EXPECT_THAT(learned, testing::AnyOf("yes<|im_end|>so<|im_end|>", "so<|im_end|>yes<|im_end|>"));
}

TEST_F(ChatDataTest, PacksWholeConversationsEachOnce) {
  std::vector<std::string> lines;
  for (int i = 0; i < 300; ++i) {
    lines.push_back(question_and_answer(std::string(static_cast<size_t>(i % 13), 'q'),
                                        "a" + std::to_string(i)));
  }
  ChatDataOptions options = written(lines);
  options.validation_fraction = 0.1;
  const auto data = read(options);
  EXPECT_THAT(data->counts().conversations, ElementsAre(270, 30));
  std::vector<std::string> learned;
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    for (const Document& document : documents(*data, split)) {
      if (!document.learned.empty()) learned.push_back(document.learned);
    }
  }
  std::vector<std::string> wanted;
  for (int i = 0; i < 300; ++i) wanted.push_back("a" + std::to_string(i) + "<|im_end|>");
  EXPECT_THAT(learned, testing::UnorderedElementsAreArray(wanted));
  // Little is left to fill.
  const auto count = [](const ChatData& of, bool all) {
    int64_t tokens = 0;
    for (int64_t s = 0; s < of.sequences(Split::kTrain, 64); ++s) {
      std::vector<int32_t> inputs(64), targets(64);
      of.read_sequence(Split::kTrain, s, inputs, targets);
      std::vector<int64_t> lengths;
      of.add_documents(Split::kTrain, s, inputs, lengths);
      int64_t at = 0;
      for (const int64_t length : lengths) {
        const auto begin = targets.begin() + at;
        const bool learns = std::any_of(begin, begin + length, [](int32_t id) { return id >= 0; });
        if (all || learns) tokens += length;
        at += length;
      }
    }
    return static_cast<double>(tokens);
  };
  EXPECT_GT(count(*data, false), 0.8 * count(*data, true));
  // The same again, and another with another seed or line.
  EXPECT_EQ(read(options)->identity(), data->identity());
  options.seed = 1;
  EXPECT_NE(read(options)->identity(), data->identity());
  lines[7] = question_and_answer("q", "other");
  ChatDataOptions other = written(lines);
  other.validation_fraction = 0.1;
  EXPECT_NE(read(other)->identity(), data->identity());
}

// Copies of a conversation are on one side, however few the validation should have.
TEST_F(ChatDataTest, CopiesStayTogether) {
  std::vector<std::string> lines;
  for (int i = 0; i < 30; ++i) {
    lines.push_back(question_and_answer("one?", "a" + std::to_string(i % 3)));
  }
  ChatDataOptions options = written(lines);
  options.validation_fraction = 0.1;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    options.seed = seed;
    const auto data = read(options);
    EXPECT_THAT(data->counts().conversations, ElementsAre(20, 10));
    std::set<std::string> held_out;
    for (const Document& document : documents(*data, Split::kValidation)) {
      if (!document.learned.empty()) held_out.insert(document.learned);
    }
    EXPECT_EQ(held_out.size(), 1u);
    for (const Document& document : documents(*data, Split::kTrain)) {
      EXPECT_FALSE(held_out.contains(document.learned));
    }
  }
}

// More lines than are read at once.
TEST_F(ChatDataTest, EveryLineIsReadOnce) {
  std::vector<std::string> lines;
  for (int i = 0; i < 4100; ++i) {
    lines.push_back(i == 4099 ? "{" : question_and_answer("q", std::to_string(i)));
  }
  ChatDataOptions options = written(lines);
  EXPECT_THAT(fault(options), HasSubstr("talks.jsonl: line 4100"));
  options.skip_bad_lines = true;
  const auto data = read(options);
  EXPECT_EQ(data->counts().conversations[0] + data->counts().conversations[1], 4099);
  EXPECT_EQ(data->counts().skipped, 1);
}

TEST_F(ChatDataTest, LongConversationsAreCutOrLeftOut) {
  const std::string words = "one and two are three and one and two are three, yes or no";
  const auto data =
      read(written({question_and_answer("one?", words + words),
                    question_and_answer(words + words, "yes"), question_and_answer("two?", "no")},
                   24));
  EXPECT_THAT(data->counts().conversations, ElementsAre(1, 1));
  EXPECT_EQ(data->counts().cut, 1);
  EXPECT_EQ(data->counts().too_long, 1);
  EXPECT_THAT(fault(written({question_and_answer(words + words, "yes")}, 8)),
              HasSubstr("in 1 no answer begins within the 8 tokens of a sequence"));
}

// This template is like Qwen3's: the last answer has what earlier ones have lost.
TEST_F(ChatDataTest, TemplatesThatRenderTheLastAnswerInAnotherWay) {
  const auto data = read(
      written(
          {R"({"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "yes"}, )"
           R"({"role": "user", "content": "two?"}, {"role": "assistant", "content": "no"}]})"},
          128),
      chat("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == "
           "'assistant' "
           "%}(so){% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
           "<|im_start|>assistant\n{% endif %}"));
  EXPECT_EQ(documents(*data, Split::kTrain, 128)[0].learned, "yes<|im_end|>(so)no<|im_end|>");
}

TEST_F(ChatDataTest, RefusesLinesByTheirNumber) {
  const std::string good = question_and_answer("one?", "yes");
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"{", "not valid JSON"},
      {"[1]", "it is no JSON object"},
      {R"({"text": "one"})", "it has neither messages nor prompt and completion"},
      {R"({"messages": 3})", "messages must be a list"},
      {R"({"messages": [{"content": "one"}]})", "message 1 has no role"},
      {R"({"messages": [{"role": "user", "content": "one"}]})", "it has no answer"},
      {R"({"prompt": 1, "completion": "a"})", "prompt must be a text or a list"},
  };
  for (const auto& [line, reason] : bad) {
    EXPECT_THAT(fault(written({good, "", line, good})),
                AllOf(HasSubstr("talks.jsonl: line 3"), HasSubstr(reason)));
  }
  std::vector<std::string> lines = {good, question_and_answer("two?", "no")};
  for (const auto& [line, reason] : bad) lines.push_back(line);
  ChatDataOptions options = written(lines);
  options.skip_bad_lines = true;
  const auto data = read(options);
  EXPECT_EQ(data->counts().skipped, std::ssize(bad));
  EXPECT_THAT(data->counts().conversations, ElementsAre(1, 1));
  EXPECT_THAT(log_, HasSubstr("line 3"));
  ChatDataOptions none = written({"{", "1"});
  none.skip_bad_lines = true;
  EXPECT_THAT(fault(none), HasSubstr("no conversation to train on; 2 lines have faults"));
  EXPECT_THAT(fault({.file = temp_.path() / "talks.txt", .length = 8}), HasSubstr("JSON lines"));
  EXPECT_THAT(fault({.file = temp_.path() / "none.jsonl", .length = 8}), HasSubstr("is no file"));
}

TEST_F(ChatDataTest, RefusesTemplatesThatTrainNothing) {
  const ChatDataOptions options = written({question_and_answer("one?", "yes")});
  EXPECT_THAT(
      fault(options, chat("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                          "{% if add_generation_prompt %}assistant: {% endif %}")),
      AllOf(HasSubstr("line 1"), HasSubstr("with no special token"), HasSubstr("yes")));
  EXPECT_THAT(fault(options, chat("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
                                  "{% if add_generation_prompt %}answer: {% endif %}")),
              AllOf(HasSubstr("before message 2 in two ways: from byte 14 on"),
                    HasSubstr("\"answer: \""), HasSubstr("\"yes<|im_end|>\"")));
  EXPECT_THAT(fault(options, chat("{{ raise_exception('only one message') }}")),
              AllOf(HasSubstr("line 1"), HasSubstr("only one message")));
}

}  // namespace
}  // namespace twell
