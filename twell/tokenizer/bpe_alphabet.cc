// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/bpe_alphabet.h"

namespace twell {
namespace {

constexpr int kFirstSubstitute = 0x100;
constexpr int kSubstitutes = 68;  // number of bytes that are not printable Latin-1

constexpr bool is_printable(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

struct Alphabet {
  std::array<uint16_t, 256> characters{};                        // code point of each byte
  std::array<int16_t, kFirstSubstitute + kSubstitutes> bytes{};  // byte of each code point, or -1
  std::array<uint8_t, 256> order{};
};

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.bytes.fill(-1);
  int substitute = kFirstSubstitute;
  for (int byte = 0; byte < 256; ++byte) {
    const int character = is_printable(byte) ? byte : substitute++;
    alphabet.characters[static_cast<size_t>(byte)] = static_cast<uint16_t>(character);
    alphabet.bytes[static_cast<size_t>(character)] = static_cast<int16_t>(byte);
  }
  size_t next = 0;
  for (const int16_t byte : alphabet.bytes) {
    if (byte >= 0) alphabet.order[next++] = static_cast<uint8_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

const std::array<uint8_t, 256>& byte_alphabet_order() { return kAlphabet.order; }

std::string bytes_to_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    const uint16_t character = kAlphabet.characters[static_cast<uint8_t>(byte)];
    if (character < 0x80) {
      text += static_cast<char>(character);
    } else {
      text += static_cast<char>(0xc0 | (character >> 6));
      text += static_cast<char>(0x80 | (character & 0x3f));
    }
  }
  return text;
}

bool alphabet_to_bytes(std::string_view text, std::string& bytes) {
  bytes.clear();
  for (size_t i = 0; i < text.size(); ++i) {
    size_t character = static_cast<uint8_t>(text[i]);
    if (character >= 0x80) {
      // Every character of the alphabet takes at most two bytes in UTF-8.
      if ((character & 0xe0) != 0xc0 || i + 1 == text.size()) return false;
      character = (character & 0x1f) << 6 | (static_cast<uint8_t>(text[++i]) & 0x3f);
    }
    if (character >= kAlphabet.bytes.size() || kAlphabet.bytes[character] < 0) return false;
    bytes += static_cast<char>(kAlphabet.bytes[character]);
  }
  return true;
}

}  // namespace twell
