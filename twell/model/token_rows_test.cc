// SPDX-License-Identifier: Apache-2.0
#include "twell/model/token_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "twell/base/rng.h"

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

TEST(TokenRowsTest, EqualsAStableSort) {
  for (const int64_t vocab : {1, 2, 512, 513, 49152, 1 << 18, (1 << 18) + 1, 1 << 30}) {
    std::vector<int32_t> ids(3000);
    for (size_t i = 0; i < ids.size(); ++i) {
      // Half of them from a few, so that ids repeat.
      const int64_t most = i % 2 == 0 ? vocab : std::min<int64_t>(vocab, 40);
      ids[i] = static_cast<int32_t>(uniform_below(7, 1, i, static_cast<uint64_t>(most)));
    }
    ids[5] = static_cast<int32_t>(vocab - 1);
    std::vector<size_t> tokens(ids.size());
    std::iota(tokens.begin(), tokens.end(), size_t{0});
    std::ranges::stable_sort(tokens, {}, [&](size_t token) { return ids[token]; });
    std::vector<int32_t> want(ids.size());
    for (size_t row = 0; row < tokens.size(); ++row) want[tokens[row]] = static_cast<int32_t>(row);
    EXPECT_EQ(rows_of(ids, vocab), want) << vocab;
  }
}

TEST(TokenRowsTest, OneIdAndNoTokens) {
  EXPECT_THAT(rows_of({7, 7, 7}, 8), testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(rows_of({}, 8), testing::IsEmpty());
}

}  // namespace
}  // namespace twell
