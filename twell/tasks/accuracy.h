// SPDX-License-Identifier: Apache-2.0
// Computes accuracies from log-likelihoods.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "twell/tasks/task.h"

namespace twell {

struct ItemScore {
  std::vector<double> log_likelihoods;  // nats, one per choice
  bool correct = false;                 // the right choice has the highest one
  bool correct_norm = false;            // the same after division by each choice's characters
};
// The first of equal choices wins. Error when a log-likelihood is NaN.
ItemScore score_item(const TaskItem& item, std::vector<double> log_likelihoods);

struct Accuracy {
  double mean = 0.0;
  // Sample standard deviation / sqrt(number of items); none for a single item.
  std::optional<double> standard_error;
};
struct TaskAccuracy {
  int64_t items = 0;
  Accuracy acc;
  std::optional<Accuracy> acc_norm;  // only for tasks that define it
};
TaskAccuracy task_accuracy(const Task& task, std::span<const ItemScore> scores);

}  // namespace twell
