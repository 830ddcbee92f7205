// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/task.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "twell/base/error.h"
#include "twell/base/json_fields.h"
#include "twell/tasks/text_ops.h"

namespace twell {
namespace {

using nlohmann::json;

// A question with labelled choices, which data sets publish in two forms:
//   authors  {"question": {"stem": Q, "choices": [{"text": .., "label": ..}, ..]}, "answerKey": ..}
//   hub      {STEM_FIELD: Q, "choices": {"text": [..], "label": [..]}, "answerKey": ..}
struct Question {
  std::string stem;
  std::vector<std::string> texts, labels;
  std::string answer;  // label of the right choice

  int64_t gold(const std::string& where) const {
    const auto found = std::find(labels.begin(), labels.end(), answer);
    TWELL_REQUIRE(found != labels.end(),
                  "{}: \"answerKey\" {} is none of the choices' labels (is it a split without "
                  "answers?)",
                  where, excerpt(answer));
    return found - labels.begin();
  }
};

std::vector<std::string> strings(const JsonFields& part, std::string_view name) {
  std::vector<std::string> out;
  for (const json& value : part.array(name)) {
    TWELL_REQUIRE(value.is_string(), "{}: \"{}\" holds something else than strings", part.where(),
                  name);
    out.push_back(value.get<std::string>());
  }
  return out;
}

Question read_question(const JsonFields& item, std::string_view stem_field) {
  Question out;
  const json* question = item.find("question");
  if (question != nullptr && question->is_object()) {
    const JsonFields part(*question, item.where() + ": \"question\"");
    out.stem = part.text("stem");
    for (const json& value : part.array("choices")) {
      const JsonFields choice(value, item.where() + ": a choice");
      out.texts.push_back(choice.text("text"));
      out.labels.push_back(choice.text("label"));
    }
  } else {
    out.stem = item.text(stem_field);
    const JsonFields choices(item.object("choices"), item.where() + ": \"choices\"");
    out.texts = strings(choices, "text");
    out.labels = strings(choices, "label");
  }
  TWELL_REQUIRE(out.texts.size() == out.labels.size() && out.texts.size() >= 2,
                "{}: {} choices with {} labels", item.where(), out.texts.size(), out.labels.size());
  out.answer = item.text("answerKey");
  return out;
}

TaskItem multiple_choice(const std::string& context, const std::vector<std::string>& choices,
                         int64_t gold) {
  TaskItem out{.line = 0, .choices = {}, .gold = gold};
  for (const std::string& choice : choices) {
    out.choices.push_back({context, std::string(" ").append(choice), count_characters(choice)});
  }
  return out;
}

std::string ask(std::string_view question) {
  return fmt::format("Question: {}\nAnswer:", question);
}

TaskItem read_arc(const json& value, const std::string& where) {
  const Question question = read_question(JsonFields(value, where), "question");
  return multiple_choice(ask(question.stem), question.texts, question.gold(where));
}

TaskItem read_openbookqa(const json& value, const std::string& where) {
  Question question = read_question(JsonFields(value, where), "question_stem");
  question.answer.erase(0, question.answer.find_first_not_of(' '));
  return multiple_choice(question.stem, question.texts, question.gold(where));
}

TaskItem read_commonsense_qa(const json& value, const std::string& where) {
  const Question question = read_question(JsonFields(value, where), "question");
  const std::vector<std::string> letters = {"A", "B", "C", "D", "E"};
  TWELL_REQUIRE(question.labels == letters, "{}: the choices are not labelled A to E", where);
  std::string context = fmt::format("Question: {}\n", strip(question.stem));
  for (size_t i = 0; i < letters.size(); ++i) {
    context += fmt::format("{}. {}\n", letters[i], question.texts[i]);
  }
  return multiple_choice(context + "Answer:", letters, question.gold(where));
}

// An index that is written as a JSON number or as a string of digits.
int64_t read_index(const JsonFields& item, std::string_view name, int64_t first, int64_t last) {
  const json* field = item.find(name);
  TWELL_REQUIRE(field != nullptr, "{} has no \"{}\"", item.where(), name);
  int64_t index = first - 1;
  if (field->is_number_integer()) {
    index = field->get<int64_t>();
  } else if (field->is_string() && field->get_ref<const std::string&>().size() == 1) {
    index = field->get_ref<const std::string&>()[0] - '0';
  }
  TWELL_REQUIRE(index >= first && index <= last,
                "{}: \"{}\" is {}, not one of {} to {} (is it a split without answers?)",
                item.where(), name, excerpt(field->dump()), first, last);
  return index;
}

// HellaSwag's WikiHow texts contain leftover markup.
std::string without_markup(std::string_view text) {
  const std::string titled = replace_all(strip(text), " [title]", ". ");
  std::string out;
  for (size_t at = 0; at < titled.size();) {
    const size_t close = titled[at] == '[' ? titled.find_first_of("]\n", at) : std::string::npos;
    if (close != std::string::npos && titled[close] == ']') {
      at = close + 1;
    } else {
      out += titled[at++];
    }
  }
  return replace_all(out, "  ", " ");
}

TaskItem read_hellaswag(const json& value, const std::string& where) {
  const JsonFields item(value, where);
  const std::string context = item.text("activity_label") + ": " + item.text("ctx_a") + " " +
                              capitalize(item.text("ctx_b"));
  std::vector<std::string> endings = strings(item, "endings");
  TWELL_REQUIRE(endings.size() >= 2, "{}: {} endings", where, endings.size());
  for (std::string& ending : endings) ending = without_markup(ending);
  const int64_t gold = read_index(item, "label", 0, std::ssize(endings) - 1);
  return multiple_choice(without_markup(context), endings, gold);
}

TaskItem read_piqa(const json& value, const std::string& where) {
  const JsonFields item(value, where);
  return multiple_choice(ask(item.text("goal")), {item.text("sol1"), item.text("sol2")},
                         read_index(item, "label", 0, 1));
}

// Each context contains one option; the end of the sentence, the same for both, is scored.
TaskItem read_winogrande(const json& value, const std::string& where) {
  const JsonFields item(value, where);
  const std::string sentence = item.text("sentence");
  const size_t blank = sentence.find('_');
  TWELL_REQUIRE(blank != std::string::npos, "{}: \"sentence\" has no _", where);
  std::string end = " ";
  end += strip(std::string_view(sentence).substr(blank + 1));
  TaskItem out;
  for (const char* option : {"option1", "option2"}) {
    const std::string context = sentence.substr(0, blank) + item.text(option);
    out.choices.push_back({context, end, count_characters(context)});
  }
  out.gold = read_index(item, "answer", 1, 2) - 1;
  return out;
}

// Folders: a user's own name, then those of a copy of the data set's repository.
constexpr std::array<Task, 7> kTasks = {{
    {"arc_easy", true, "test", "arc_easy ARC-Easy ai2_arc/ARC-Easy",
     "ARC-Easy/ARC-Easy-Test.jsonl ARC-Easy-Test.jsonl", read_arc},
    {"arc_challenge", true, "test", "arc_challenge ARC-Challenge ai2_arc/ARC-Challenge",
     "ARC-Challenge/ARC-Challenge-Test.jsonl ARC-Challenge-Test.jsonl", read_arc},
    {"hellaswag", true, "validation", "hellaswag hellaswag/data",
     "hellaswag/hellaswag_val.jsonl hellaswag_val.jsonl", read_hellaswag},
    {"openbookqa", true, "test", "openbookqa openbookqa/main",
     "OpenBookQA-V1-Sep2018/Data/Main/test.jsonl", read_openbookqa},
    {"piqa", true, "validation", "piqa piqa/data piqa/plain_text",
     "piqa/valid.jsonl physicaliqa-train-dev/dev.jsonl", read_piqa},
    {"winogrande", false, "validation", "winogrande winogrande/winogrande_xl winogrande_xl",
     "winogrande/dev.jsonl winogrande_1.1/dev.jsonl", read_winogrande},
    {"commonsense_qa", false, "validation", "commonsense_qa commonsense_qa/data",
     "commonsense_qa/dev_rand_split.jsonl dev_rand_split.jsonl", read_commonsense_qa},
}};

}  // namespace

std::span<const Task> all_tasks() { return kTasks; }

const Task& find_task(std::string_view name) {
  std::string known;
  for (const Task& task : kTasks) {
    if (task.name == name) return task;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", task.name);
  }
  throw InputError(fmt::format("unknown task '{}'; there are {}", name, known));
}

std::vector<const Task*> parse_task_list(std::string_view names) {
  std::vector<const Task*> out;
  for (const std::string_view name : split_text(names, ',')) {
    const Task& task = find_task(strip(name));
    TWELL_REQUIRE(std::find(out.begin(), out.end(), &task) == out.end(), "task {} is named twice",
                  task.name);
    out.push_back(&task);
  }
  return out;
}

}  // namespace twell
