// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/text_ops.h"

#include <gtest/gtest.h>

namespace twell {
namespace {

TEST(TextOps, Strip) {
  EXPECT_EQ(strip("  a b \n"), "a b");
  EXPECT_EQ(strip("\xC2\xA0\xE3\x80\x80x\xE2\x80\x83"), "x");  // no-break, ideographic, em space
  EXPECT_EQ(strip("\x1C\x1Fy\x85"), "y\x85");                  // a lone 0x85 is invalid UTF-8
  EXPECT_EQ(strip("\xE2\x80\x8Bz"), "\xE2\x80\x8Bz");          // U+200B is not white space
  EXPECT_EQ(strip(" \t "), "");
  EXPECT_EQ(strip(""), "");
  EXPECT_EQ(strip_end(" a \r\n"), " a");
  EXPECT_EQ(strip_end("\xC3\xA9 "), "\xC3\xA9");
}

TEST(TextOps, Capitalize) {
  EXPECT_EQ(capitalize("hELLO World"), "Hello world");
  EXPECT_EQ(capitalize("\xC3\xA9T\xC3\x89"), "\xC3\x89t\xC3\xA9");  // éTÉ
  EXPECT_EQ(capitalize("\xC7\x86x"), "\xC7\x85x");  // dž has a title case of its own
  EXPECT_EQ(capitalize("[step] He"), "[step] he");
  EXPECT_EQ(capitalize("\xFFQ"), "\xFFq");  // invalid UTF-8 is kept
  EXPECT_EQ(capitalize(""), "");
}

TEST(TextOps, ReplaceAllGoesOnBehindWhatItPutIn) {
  EXPECT_EQ(replace_all("a    b", "  ", " "), "a  b");
  EXPECT_EQ(replace_all("aaa", "aa", "a"), "aa");
  EXPECT_EQ(replace_all("x", "y", "z"), "x");
  EXPECT_EQ(replace_all("", "y", "z"), "");
}

TEST(TextOps, CharactersAreNotBytes) {
  EXPECT_EQ(count_characters("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"), 4);
  EXPECT_EQ(count_characters(""), 0);
}

}  // namespace
}  // namespace twell
