// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/step_graphs.h"

#include <gtest/gtest.h>

namespace twell {
namespace {

enum class Captured { kNothing, kDense, kSparse };

TEST(StepGraphs, AGraphEndsWithTheRevisionOfItsExecutions) {
  StepGraphs<int, Captured> graphs(8);
  graphs.at(1, 0) = Captured::kDense;
  graphs.at(2, 0) = Captured::kDense;
  EXPECT_EQ(graphs.at(1, 0), Captured::kDense);
  EXPECT_EQ(graphs.at(1, 1), Captured::kNothing) << "a replay would run what was chosen before";
  graphs.at(1, 1) = Captured::kSparse;
  EXPECT_EQ(graphs.at(2, 1), Captured::kNothing) << "a replay would run what was chosen before";
  EXPECT_EQ(graphs.at(1, 1), Captured::kSparse);
}

TEST(StepGraphs, TheirNumberIsBounded) {
  StepGraphs<int, Captured> graphs(2);
  graphs.at(1, 0) = Captured::kDense;
  graphs.at(2, 0) = Captured::kDense;
  EXPECT_EQ(graphs.at(1, 0), Captured::kDense);
  EXPECT_EQ(graphs.at(3, 0), Captured::kNothing);
  EXPECT_EQ(graphs.at(1, 0), Captured::kNothing);
}

}  // namespace
}  // namespace twell
