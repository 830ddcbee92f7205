// SPDX-License-Identifier: Apache-2.0
#include "twell/model/token_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twell {
namespace {

std::vector<int32_t> rows_of(const std::vector<int32_t>& ids, int64_t vocab) {
  std::vector<int32_t> rows(ids.size(), -1);
  rows_by_id(ids, vocab, rows);
  return rows;
}

TEST(TokenRowsTest, TokensOfAnIdFollowEachOtherInTheOrderOfTheText) {
  EXPECT_THAT(rows_of({3, 0, 3, 4, 0, 3}, 5), testing::ElementsAre(2, 0, 3, 5, 1, 4));
}

TEST(TokenRowsTest, UnknownTokensCountAsTheFirstId) {
  EXPECT_THAT(rows_of({2, -1, 0, -3}, 3), testing::ElementsAre(3, 0, 1, 2));
}

TEST(TokenRowsTest, OneIdAndNoTokens) {
  EXPECT_THAT(rows_of({7, 7, 7}, 8), testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(rows_of({}, 8), testing::IsEmpty());
}

}  // namespace
}  // namespace twell
