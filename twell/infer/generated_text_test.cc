// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/generated_text.h"

#include <gtest/gtest.h>

#include <string>

namespace twell {
namespace {

TEST(GeneratedText, PassesTextThrough) {
  GeneratedText stream({});
  EXPECT_EQ(stream.push("abc"), "abc");
  EXPECT_EQ(stream.push(" d"), " d");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_FALSE(stream.stopped());
}

TEST(GeneratedText, HoldsBackHalfACharacter) {
  GeneratedText stream({});
  EXPECT_EQ(stream.push("a\xE2"), "a");
  EXPECT_EQ(stream.push("\x82"), "");
  EXPECT_EQ(stream.push("\xAC!"), "\xE2\x82\xAC!");
  EXPECT_EQ(stream.push("\xF0\x9F\x98"), "");
  EXPECT_EQ(stream.finish(), "\xF0\x9F\x98");  // the model's bytes are kept
}

TEST(GeneratedText, StopStringAcrossTokens) {
  GeneratedText stream({"END"});
  EXPECT_EQ(stream.push("x E"), "x ");
  EXPECT_EQ(stream.push("N"), "");
  EXPECT_EQ(stream.push("D and more"), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.push("y"), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(GeneratedText, ReleasesAFalseStart) {
  GeneratedText stream({"aab"});
  EXPECT_EQ(stream.push("aa"), "");
  EXPECT_EQ(stream.push("a"), "a");
  EXPECT_EQ(stream.push("c"), "aac");
  EXPECT_EQ(stream.push("a"), "");
  EXPECT_EQ(stream.finish(), "a");
}

TEST(GeneratedText, EarliestOfSeveralStopsWins) {
  GeneratedText stream({"two", "one", ""});
  EXPECT_EQ(stream.push("1 one two"), "1 ");
  EXPECT_TRUE(stream.stopped());
}

}  // namespace
}  // namespace twell
