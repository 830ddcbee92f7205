// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/accuracy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "twell/base/error.h"

namespace twell {
namespace {

TaskItem item(const std::vector<int64_t>& characters, int64_t gold) {
  TaskItem out;
  for (const int64_t n : characters) out.choices.push_back({"", "", n});
  out.gold = gold;
  return out;
}

TEST(Accuracy, OfOneItem) {
  // The scores per character are -1 and -0.5.
  const ItemScore score = score_item(item({2, 8}, 1), {-2.0, -4.0});
  EXPECT_FALSE(score.correct);
  EXPECT_TRUE(score.correct_norm);
  // The first of equal choices wins.
  EXPECT_TRUE(score_item(item({1, 1, 1}, 0), {-2.0, -2.0, -3.0}).correct);
  EXPECT_FALSE(score_item(item({1, 1, 1}, 1), {-2.0, -2.0, -3.0}).correct);
  // A choice without characters never wins per character.
  EXPECT_TRUE(score_item(item({0, 5}, 1), {-0.5, -50.0}).correct_norm);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(score_item(item({1, 1}, 0), {-1.0, nan}), Error);
  EXPECT_THROW(score_item(item({1, 1}, 0), {-1.0}), Error);
}

TEST(Accuracy, OfATask) {
  std::vector<ItemScore> scores(5);
  scores[1].correct = scores[4].correct = true;
  scores[0].correct_norm = true;
  const TaskAccuracy out = task_accuracy(find_task("piqa"), scores);
  EXPECT_EQ(out.items, 5);
  EXPECT_DOUBLE_EQ(out.acc.mean, 0.4);
  // For 0 1 0 0 1 the squared deviations sum to 3 * 0.16 + 2 * 0.36 = 1.2.
  EXPECT_DOUBLE_EQ(out.acc.standard_error.value(), std::sqrt(1.2 / 4.0) / std::sqrt(5.0));
  EXPECT_DOUBLE_EQ(out.acc_norm.value().mean, 0.2);
  EXPECT_FALSE(task_accuracy(find_task("winogrande"), scores).acc_norm.has_value());
  scores.resize(1);
  EXPECT_FALSE(task_accuracy(find_task("piqa"), scores).acc.standard_error.has_value());
}

}  // namespace
}  // namespace twell
