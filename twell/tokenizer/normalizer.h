// SPDX-License-Identifier: Apache-2.0
// Unicode normalization form C, the one normalizer supported. It is lossy: a text that is not in
// form C comes back in it. Bytes that are not valid UTF-8 pass through. Marks that Hugging Face's
// `tokenizers` does not know (Unicode 10 and later) stay where they are, as there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace twell {

// Returns text itself when it is in form C already, else a view of `buffer`, which holds the
// result.
std::string_view normalize_nfc(std::string_view text, std::string& buffer);

// Whether the character is one of those.
bool is_unknown_to_reference(int32_t character);

}  // namespace twell
