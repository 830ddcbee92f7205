// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/accuracy.h"

#include <algorithm>
#include <cmath>

#include "twell/base/error.h"

namespace twell {
namespace {

int64_t index_of_highest(const std::vector<double>& values) {
  return std::max_element(values.begin(), values.end()) - values.begin();
}

Accuracy accuracy(std::span<const ItemScore> scores, bool ItemScore::*correct) {
  Accuracy out;
  const auto n = static_cast<double>(scores.size());
  out.mean = static_cast<double>(std::ranges::count(scores, true, correct)) / n;
  // Scores are 0 or 1, so their squared deviations from the mean p sum to n p (1 - p).
  if (scores.size() > 1) out.standard_error = std::sqrt(out.mean * (1.0 - out.mean) / (n - 1.0));
  return out;
}

}  // namespace

ItemScore score_item(const TaskItem& item, std::vector<double> log_likelihoods) {
  TWELL_CHECK(log_likelihoods.size() == item.choices.size(), "{} scores for {} choices",
              log_likelihoods.size(), item.choices.size());
  std::vector<double> normalized;
  for (size_t i = 0; i < log_likelihoods.size(); ++i) {
    TWELL_CHECK(!std::isnan(log_likelihoods[i]), "the log-likelihood of choice {} is not a number",
                i);
    normalized.push_back(log_likelihoods[i] / static_cast<double>(item.choices[i].characters));
  }
  ItemScore out;
  out.correct = index_of_highest(log_likelihoods) == item.gold;
  out.correct_norm = index_of_highest(normalized) == item.gold;
  out.log_likelihoods = std::move(log_likelihoods);
  return out;
}

TaskAccuracy task_accuracy(const Task& task, std::span<const ItemScore> scores) {
  TWELL_CHECK(!scores.empty(), "no items to take an accuracy of");
  TaskAccuracy out{.items = std::ssize(scores), .acc = accuracy(scores, &ItemScore::correct)};
  if (task.has_acc_norm) out.acc_norm = accuracy(scores, &ItemScore::correct_norm);
  return out;
}

}  // namespace twell
