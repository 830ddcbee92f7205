// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "twell/base/error.h"

namespace twell {
namespace {

using nlohmann::json;

TaskItem read(const char* task, const json& item) { return find_task(task).read(item, "f line 3"); }

std::string fault(const char* task, const json& item) {
  try {
    read(task, item);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

const json kHub = json::parse(R"({"id": "x", "question": "Why?", "answerKey": "B",
  "choices": {"text": ["one", "zwölf"], "label": ["A", "B"]}})");
const json kAuthors = json::parse(R"({"id": "x", "answerKey": "B", "question": {"stem": "Why?",
  "choices": [{"text": "one", "label": "A"}, {"text": "zwölf", "label": "B"}]}})");

TEST(Task, BothFormsOfAQuestion) {
  for (const json& item : {kHub, kAuthors}) {
    const TaskItem read_item = read("arc_easy", item);
    ASSERT_EQ(read_item.choices.size(), 2u);
    EXPECT_EQ(read_item.choices[1].context, "Question: Why?\nAnswer:");
    EXPECT_EQ(read_item.choices[1].continuation, " zwölf");
    EXPECT_EQ(read_item.choices[1].characters, 5);
    EXPECT_EQ(read_item.gold, 1);
  }
}

TEST(Task, HellaswagIsCleaned) {
  const TaskItem item = read(
      "hellaswag",
      json{{"activity_label", "Home"},
           {"ctx_a", " [header] How [title] To. [step]  Now"},
           {"ctx_b", "he IS"},
           {"label", "1"},
           {"endings", {"[a] x  y ", "[open [one] two [title]", "[two\nlines] z", "   gone"}}});
  // Double spaces are replaced in a single pass, so that three leave two.
  EXPECT_EQ(item.choices[0].context, "Home:  How. To.  Now He is");
  EXPECT_EQ(item.choices[0].continuation, "  x y");
  EXPECT_EQ(item.choices[1].continuation, "  two. ");
  EXPECT_EQ(item.choices[2].continuation, " [two\nlines] z");
  EXPECT_EQ(item.choices[3].continuation, " gone");
  EXPECT_EQ(item.choices[0].characters, 4);
  EXPECT_EQ(item.gold, 1);
}

TEST(Task, WinograndeScoresTheEndOfTheSentence) {
  const TaskItem item = read("winogrande", json{{"sentence", "He saw _  and _ left. "},
                                                {"option1", "Tom"},
                                                {"option2", "Ann"},
                                                {"answer", "2"}});
  ASSERT_EQ(item.choices.size(), 2u);
  EXPECT_EQ(item.choices[0].context, "He saw Tom");
  EXPECT_EQ(item.choices[1].context, "He saw Ann");
  EXPECT_EQ(item.choices[0].continuation, " and _ left.");
  EXPECT_EQ(item.gold, 1);
}

TEST(Task, FaultsNameThePlaceAndTheField) {
  using testing::HasSubstr;
  const auto without = [](json item, const char* field) {
    item.erase(field);
    return item;
  };
  EXPECT_THAT(fault("arc_easy", without(kHub, "answerKey")),
              HasSubstr("f line 3 has no \"answerKey"));
  EXPECT_THAT(fault("arc_easy", without(kHub, "choices")), HasSubstr("f line 3 has no \"choices"));
  EXPECT_THAT(fault("openbookqa", kHub), HasSubstr("\"question_stem\""));
  EXPECT_THAT(fault("commonsense_qa", kHub), HasSubstr("f line 3: the choices are not labelled"));
  json item = kHub;
  item["answerKey"] = "";
  EXPECT_THAT(fault("arc_challenge", item), HasSubstr("f line 3: \"answerKey\" \"\""));
  item = kHub;
  item["choices"]["label"] = {"A"};
  EXPECT_THAT(fault("arc_easy", item), HasSubstr("2 choices with 1 labels"));
  item["choices"]["text"] = {"A", 3};
  EXPECT_THAT(fault("arc_easy", item), HasSubstr("\"text\""));
  EXPECT_THAT(fault("arc_easy", json::array()), HasSubstr("f line 3 is not an object"));
  EXPECT_THAT(fault("piqa", json{{"goal", "g"}, {"sol1", "a"}, {"sol2", "b"}, {"label", -1}}),
              HasSubstr("\"label\" is"));
  EXPECT_THAT(fault("winogrande", json{{"sentence", "no blank"}, {"answer", "1"}}), HasSubstr("_"));
  EXPECT_THAT(fault("hellaswag", json{{"activity_label", "a"},
                                      {"ctx_a", "b"},
                                      {"ctx_b", "c"},
                                      {"endings", {"x", "y"}},
                                      {"label", ""}}),
              HasSubstr("split without answers"));
}

TEST(Task, Names) {
  EXPECT_EQ(all_tasks().size(), 7u);
  EXPECT_EQ(parse_task_list("piqa, winogrande").size(), 2u);
  EXPECT_THROW(find_task("mmlu"), InputError);
  EXPECT_THROW(parse_task_list("piqa,piqa"), InputError);
  EXPECT_THROW(parse_task_list("piqa,"), InputError);
  EXPECT_THROW(parse_task_list(""), InputError);
}

}  // namespace
}  // namespace twell
