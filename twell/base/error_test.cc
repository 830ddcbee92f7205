// SPDX-License-Identifier: Apache-2.0
#include "twell/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twell {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

template <typename Fn>
std::string message_of(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(Error, CheckCarriesValuesAndSource) {
  const auto fail = [] { TWELL_CHECK(1 > 2, "expected {} rows, got {}", 3, 4); };
  EXPECT_THAT(message_of(fail),
              MatchesRegex("expected 3 rows, got 4 \\(.*error_test\\.cc:[0-9]+\\)"));
}

TEST(Error, RequireIsOneLineForTheUser) {
  const auto fail = [] { TWELL_REQUIRE(false, "{} is empty; give it some text", "a.txt"); };
  EXPECT_EQ(message_of(fail), "a.txt is empty; give it some text");
  EXPECT_THROW(fail(), InputError);
}

TEST(Error, ACheckIsNotTheUsersFault) {
  try {
    TWELL_CHECK(false, "broken");
  } catch (const InputError&) {
    FAIL() << "a broken contract was reported as bad input";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("broken"));
  }
}

TEST(Error, NothingIsEvaluatedWhenTheConditionHolds) {
  int evaluations = 0;
  TWELL_CHECK(true, "{}", ++evaluations);
  TWELL_REQUIRE(true, "{}", ++evaluations);
  EXPECT_EQ(evaluations, 0);
}

}  // namespace
}  // namespace twell
