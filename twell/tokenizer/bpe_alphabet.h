// SPDX-License-Identifier: Apache-2.0
// The byte alphabet of tokenizer.json: byte-level vocabularies spell each byte as one printable
// character (GPT-2's table: printable Latin-1 as itself, the other 68 bytes as U+0100 and up).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace twell {

// The 256 bytes in the order of their characters, which is the order of ids in GPT-2's vocabulary.
const std::array<uint8_t, 256>& byte_alphabet_order();

// Spells bytes in the alphabet: "\n the" -> "ĊĠthe".
std::string bytes_to_alphabet(std::string_view bytes);

// The inverse. False when text has a character outside the alphabet; bytes is then unspecified.
bool alphabet_to_bytes(std::string_view text, std::string& bytes);

}  // namespace twell
