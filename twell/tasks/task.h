// SPDX-License-Identifier: Apache-2.0
// Multiple-choice tasks: what a model is asked, item by item.
//
// Prompts, answers and what acc_norm divides by are those of lm-evaluation-harness (tasks of
// version 1, without examples in the prompt), so that accuracies compare with published ones:
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
// The choice with the highest log-likelihood is the answer; acc_norm divides it by the number of
// characters of the choice first.
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
  int64_t characters = 0;    // of the choice: what acc_norm divides by
};

struct TaskItem {
  int64_t line = 0;  // or row of its file, from 1
  std::vector<TaskChoice> choices;
  int64_t gold = 0;  // index of the right choice
};

struct Task {
  std::string_view name;
  bool has_acc_norm = true;
  std::string_view split;                     // the one that is scored
  std::span<const std::string_view> folders;  // that may hold the data set as the hub exports it
  std::span<const std::string_view> files;    // names that the authors gave it, best first
  // Reads an item in the form in which the data set's authors or the Hugging Face hub publish it;
  // line is left 0. `where` is named in the InputError about a missing or impossible field.
  TaskItem (*read)(const nlohmann::json& item, const std::string& where);
};

std::span<const Task> all_tasks();
// InputError lists the names.
const Task& find_task(std::string_view name);
// "piqa,winogrande"; InputError on an unknown name, a repeated one, or none.
std::vector<const Task*> parse_task_list(std::string_view names);

}  // namespace twell
