// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/prompt_draft.h"

#include <gtest/gtest.h>

namespace twell {
namespace {

using Ids = std::vector<int32_t>;

TEST(PromptLookup, GuessesWhatFollowedBefore) {
  PromptLookup lookup;
  EXPECT_EQ(lookup.guess(Ids{}, 4), Ids{});
  EXPECT_EQ(lookup.guess(Ids{1, 2}, 4), Ids{});
  EXPECT_EQ(lookup.guess(Ids{1, 2, 3, 4, 5}, 4), Ids{});
  EXPECT_EQ(lookup.guess(Ids{1, 2, 3, 4, 5, 1, 2, 3}, 2), (Ids{4, 5}));
  // The guess reaches the context's end and goes on from itself.
  EXPECT_EQ(lookup.guess(Ids{1, 2, 3, 4, 5, 1, 2, 3}, 8), (Ids{4, 5, 1, 2, 3, 4, 5, 1}));
  // The place stays while it is right, and is another one once it is not.
  EXPECT_EQ(lookup.guess(Ids{1, 2, 3, 4, 5, 1, 2, 3, 4}, 2), (Ids{5, 1}));
  EXPECT_EQ(lookup.guess(Ids{1, 2, 3, 4, 5, 1, 2, 3, 4, 9}, 2), Ids{});
  EXPECT_EQ(lookup.guess(Ids{1, 2, 3, 4, 5, 1, 2, 3, 4, 9, 2, 3, 4}, 1), Ids{9});
}

TEST(PromptLookup, ARightPlaceGoesOnCounting) {
  PromptLookup lookup;
  // 1 2 3 stands twice, with another end; the first place is followed while it is right.
  Ids context = {6, 1, 2, 3, 8, 4, 4, 1, 2, 3, 9, 5, 5, 8, 7, 1, 2};
  EXPECT_EQ(lookup.guess(context, 3), Ids{});
  context.push_back(3);
  EXPECT_EQ(lookup.guess(context, 2), (Ids{9, 5}));  // the last time
  context.push_back(8);
  EXPECT_EQ(lookup.guess(context, 2), (Ids{4, 4}));
  context.push_back(4);
  EXPECT_EQ(lookup.guess(context, 2), (Ids{4, 1}));
}

TEST(DraftLength, GrowsWithWhatIsRight) {
  const auto cost = [](int64_t count) { return 0.1 * static_cast<double>(count); };
  DraftLength length(20);
  EXPECT_EQ(length.next(cost), 4);
  for (const int64_t expected : {8, 16, 20, 20}) {
    const int64_t count = length.next(cost);
    length.took(count, count, cost(count));
    EXPECT_EQ(length.next(cost), expected);
  }
  length.took(20, 5, cost(20));
  EXPECT_EQ(length.next(cost), 5);
  length.took(5, 0, cost(5));
  EXPECT_EQ(length.next(cost), 1);
}

// Drafts that are always wrong cost a text one token in fifty and the first credit.
TEST(DraftLength, WrongGuessesCostLittle) {
  for (const double each : {0.05, 0.5, 0.9, 3.0}) {
    const auto cost = [&](int64_t count) {
      return count == 0 ? 0.0 : 0.4 + each * static_cast<double>(count);
    };
    DraftLength length(16);
    double lost = 0.0;
    for (int token = 1; token <= 2000; ++token) {
      const int64_t count = length.next(cost);
      length.took(count, 0, cost(count));
      lost += cost(count);
      ASSERT_LE(lost, 1.0 + 0.02 * token + 1e-9) << token;
    }
    // A text that begins to repeat itself is noticed.
    int64_t guessed = 0;
    for (int token = 0; token < 400 && each < 0.6; ++token) {
      const int64_t count = length.next(cost);
      length.took(count, count, cost(count));
      guessed += count;
    }
    if (each < 0.1) {
      EXPECT_GT(guessed, 3000);
    }
  }
}

// However much right guesses have gained before, little is lost once they are wrong.
TEST(DraftLength, GainsDoNotPayForManyWrongGuesses) {
  const auto cost = [](int64_t count) { return 0.3 * static_cast<double>(count); };
  DraftLength length(16);
  for (int step = 0; step < 200; ++step) {
    const int64_t count = length.next(cost);
    length.took(count, count, cost(count));
  }
  double lost = 0.0;
  for (int token = 1; token <= 500; ++token) {
    const int64_t count = length.next(cost);
    length.took(count, 0, cost(count));
    lost += cost(count);
    ASSERT_LE(lost, 4.0 + 0.02 * token + 1e-9) << token;
  }
  EXPECT_GT(lost, 1.0);
}

}  // namespace
}  // namespace twell
