// SPDX-License-Identifier: Apache-2.0
// Unicode normalization form C, the only supported normalizer. It is lossy: decoding gives form C
// for any text. Bytes that are not valid UTF-8 are unchanged, as are marks that Hugging Face's
// `tokenizers` does not know (Unicode 10 and later), because it leaves them alone too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace twell {

// Returns text itself when it is already in form C, else a view of the result in `buffer`.
std::string_view normalize_nfc(std::string_view text, std::string& buffer);

// The character that starts a non-empty text; code -1 and one byte when it is not valid UTF-8.
struct Character {
  int32_t code = -1;
  size_t size = 1;  // bytes
};
Character first_character(std::string_view text);
bool is_white_space(int32_t character);     // as Unicode's White_Space
bool is_word_character(int32_t character);  // as \w of Unicode's regular expressions (UTS #18)

// Whether Hugging Face's `tokenizers` does not know this mark (Unicode 10 and later).
bool is_unknown_to_reference(int32_t character);

}  // namespace twell
