// SPDX-License-Identifier: Apache-2.0
#include "twell/base/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace twell {
namespace {

uint64_t load64(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

bool is_continuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

// Advances over ASCII, 32 bytes at a time while there is room.
const unsigned char* skip_ascii(const unsigned char* p, const unsigned char* end) {
  constexpr uint64_t kHighBits = 0x8080808080808080u;
  while (end - p >= 32) {
    const uint64_t any = load64(p) | load64(p + 8) | load64(p + 16) | load64(p + 24);
    if (any & kHighBits) break;
    p += 32;
  }
  while (p < end && *p < 0x80) ++p;
  return p;
}

// The next four bytes, the first one lowest. Bytes past the end are 0, which continues no sequence.
uint32_t load_sequence(const unsigned char* p, const unsigned char* end) {
  const auto byte = [&](int i) { return uint32_t{p[i]} << (8 * i); };
  if (end - p >= 4) return byte(0) | byte(1) | byte(2) | byte(3);
  uint32_t bytes = 0;
  for (int i = 0; i < end - p; ++i) bytes |= byte(i);
  return bytes;
}

// Length of the well-formed sequence of two to four bytes that starts the word; 0 if there is none.
// Each form is recognised by the fixed bits of all its bytes at once; then overlong forms (no bit
// set beyond what a shorter form holds), surrogates and too high values are refused.
size_t sequence_length(uint32_t bytes) {
  if ((bytes & 0x0000C0E0) == 0x000080C0) return (bytes & 0x1E) != 0 ? 2 : 0;
  if ((bytes & 0x00C0C0F0) == 0x008080E0) {
    const uint32_t top_bits = bytes & 0x200F;  // bits 15-12 of the character, and bit 11 in 0x2000
    return top_bits != 0 && top_bits != 0x200D ? 3 : 0;
  }
  if ((bytes & 0xC0C0C0F8) == 0x808080F0) {
    const uint32_t plane = (bytes & 0x07) << 2 | (bytes & 0x3000) >> 12;
    return plane >= 1 && plane <= 16 ? 4 : 0;
  }
  return 0;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  const auto* begin = reinterpret_cast<const unsigned char*>(text.data());
  const auto* end = begin + text.size();
  const auto* p = begin;
  while ((p = skip_ascii(p, end)) < end) {
    // Text in other scripts stays in this loop, which does not probe for ASCII after each letter.
    while (p < end && *p >= 0x80) {
      const size_t length = sequence_length(load_sequence(p, end));
      if (length == 0) return static_cast<size_t>(p - begin);
      p += length;
    }
  }
  return text.size();
}

size_t utf8_prefix(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text.size();
  // A sequence has at most three continuation bytes; longer runs of them are invalid wherever they
  // are cut.
  const size_t lowest = limit - std::min<size_t>(limit, 3);
  for (size_t cut = limit; cut > lowest; --cut) {
    if (!is_continuation(static_cast<unsigned char>(text[cut]))) return cut;
  }
  return is_continuation(static_cast<unsigned char>(text[lowest])) ? limit : lowest;
}

}  // namespace twell
