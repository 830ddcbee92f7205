// SPDX-License-Identifier: Apache-2.0
// From log-likelihoods to accuracies.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "twell/tasks/task.h"

namespace twell {

struct ItemScore {
  std::vector<double> log_likelihoods;  // nats, per choice
  bool correct = false;                 // the highest is the right choice's
  bool correct_norm = false;            // the same, each divided by its choice's characters
};
// Of equal choices the first counts. Error when a log-likelihood is not a number.
ItemScore score_item(const TaskItem& item, std::vector<double> log_likelihoods);

struct Accuracy {
  double mean = 0.0;
  // Sample standard deviation over the square root of the number of items; none for one item.
  std::optional<double> standard_error;
};
struct TaskAccuracy {
  int64_t items = 0;
  Accuracy acc;
  std::optional<Accuracy> acc_norm;  // where the task has it
};
TaskAccuracy task_accuracy(const Task& task, std::span<const ItemScore> scores);

}  // namespace twell
