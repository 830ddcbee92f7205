// SPDX-License-Identifier: Apache-2.0
#include "twell/base/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "twell/base/rng.h"

namespace twell {
namespace {

std::string encode(uint32_t code) {
  const auto low = [&](int shift) { return static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) return {static_cast<char>(0xC0 | (code >> 6)), low(0)};
  if (code < 0x10000) return {static_cast<char>(0xE0 | (code >> 12)), low(6), low(0)};
  return {static_cast<char>(0xF0 | (code >> 18)), low(12), low(6), low(0)};
}

// A sequence is well formed if it is the encoding of some character: the definition, tried out.
size_t find_invalid_by_definition(const std::string& text) {
  size_t at = 0;
  while (at < text.size()) {
    size_t length = 1;
    while (at + length < text.size() && (text[at + length] & 0xC0) == 0x80 && length < 4) ++length;
    for (; length > 0; --length) {
      const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
      uint32_t code = length == 1 ? byte(0) : byte(0) & (0x7Fu >> length);
      for (size_t i = 1; i < length; ++i) code = code << 6 | (byte(i) & 0x3Fu);
      const bool is_character = code < 0xD800 || (code > 0xDFFF && code <= 0x10FFFF);
      if (is_character && encode(code) == text.substr(at, length)) break;
    }
    if (length == 0) return at;
    at += length;
  }
  return at;
}

TEST(Utf8, AcceptsEveryCharacterAtEveryAlignment) {
  for (uint32_t code = 0; code <= 0x10FFFF; ++code) {
    const std::string text = std::string(code % 40, 'x') + encode(code);
    const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
    ASSERT_EQ(find_invalid_utf8(text), surrogate ? code % 40 : text.size()) << code;
  }
}

TEST(Utf8, RefusesEverySequenceThatIsNotACharacter) {
  for (uint32_t bits = 0; bits < 1u << 24; bits += 7) {  // 7: coprime to the byte size
    const std::string text = {static_cast<char>(bits >> 16), static_cast<char>(bits >> 8),
                              static_cast<char>(bits)};
    ASSERT_EQ(find_invalid_utf8(text), find_invalid_by_definition(text)) << bits;
  }
  for (uint64_t i = 0; i < 300000; ++i) {
    // Four bytes around the limits of the four-byte form.
    const auto random = philox(1, 2, i);
    const std::string text = {
        static_cast<char>(0xEE + random[0] % 8), static_cast<char>(0x78 + random[1] % 80),
        static_cast<char>(0x78 + random[2] % 80), static_cast<char>(0x78 + random[3] % 80)};
    ASSERT_EQ(find_invalid_utf8(text), find_invalid_by_definition(text)) << i;
  }
}

TEST(Utf8, FindsTheOffsetInLongText) {
  std::string text;
  while (text.size() < 1000) text += "plain text, then caf\u00e9, \u4e2d\u6587 and \U0001F600; ";
  ASSERT_EQ(find_invalid_utf8(text), text.size());
  for (size_t at = 0; at < text.size(); ++at) {
    std::string bad = text;
    bad[at] = '\xFF';
    ASSERT_EQ(find_invalid_utf8(bad), find_invalid_by_definition(bad)) << at;
    ASSERT_EQ(find_invalid_utf8(text.substr(0, at)), utf8_prefix(text, at)) << at;
  }
}

TEST(Utf8, PrefixEndsBetweenCharacters) {
  const std::string text = "a\u00e9\u4e2d\U0001F600";  // 1 + 2 + 3 + 4 bytes
  const size_t expected[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10};
  for (size_t limit = 0; limit < 12; ++limit) EXPECT_EQ(utf8_prefix(text, limit), expected[limit]);
  EXPECT_EQ(utf8_prefix("\x80\x80\x80\x80\x80\x80", 5), 5u);  // no boundary to go back to
}

}  // namespace
}  // namespace twell
