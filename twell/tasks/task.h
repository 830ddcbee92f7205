// SPDX-License-Identifier: Apache-2.0
// Multiple-choice tasks and their items.
//
// Prompts, answers and acc_norm's divisors are those of lm-evaluation-harness (tasks of version 1,
// zero-shot), so that accuracies are comparable with published ones:
//
//   task            split       context                                    scored
//   arc_easy        test        "Question: Q\nAnswer:"                     " " + choice
//   arc_challenge   test        "Question: Q\nAnswer:"                     " " + choice
//   hellaswag       validation  "ACTIVITY: CTX_A Ctx_b", cleaned           " " + ending, cleaned
//   openbookqa      test        Q                                          " " + choice
//   piqa            validation  "Question: GOAL\nAnswer:"                  " " + solution
//   winogrande      validation  the sentence up to _, and an option        " " + what follows _
//   commonsense_qa  validation  "Question: Q\nA. .. E. ..\nAnswer:"        " " + letter
//
// The model's answer is the choice with the highest log-likelihood; acc_norm first divides each
// log-likelihood by the choice's number of characters.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

struct TaskChoice {
  std::string context;       // may be empty
  std::string continuation;  // its log-likelihood given the context is the choice's score
  int64_t characters = 0;    // of the choice; acc_norm divides by it
};

struct TaskItem {
  int64_t line = 0;  // line or row of its file, from 1
  std::vector<TaskChoice> choices;
  int64_t gold = 0;  // index of the right choice
};

struct Task {
  std::string_view name;
  bool has_acc_norm = true;
  std::string_view split;    // the split that is scored
  std::string_view folders;  // that may hold the hub's export, with spaces between them
  std::string_view files;    // the authors' file names, likewise, in order of preference
  // Reads an item in the form published by the data set's authors or the Hugging Face hub; leaves
  // `line` 0. InputError, naming `where`, about a missing or invalid field.
  TaskItem (*read)(const nlohmann::json& item, const std::string& where);
};

std::span<const Task> all_tasks();
// InputError lists the known names.
const Task& find_task(std::string_view name);
// Parses "piqa,winogrande". InputError when a name is unknown or repeated, or the list is empty.
std::vector<const Task*> parse_task_list(std::string_view names);

}  // namespace twell
