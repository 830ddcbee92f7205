// SPDX-License-Identifier: Apache-2.0
// UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
#pragma once

#include <cstddef>
#include <string_view>

namespace twell {

// Offset of the first byte that does not begin a well-formed sequence within text; text.size() if
// all of it is well formed.
size_t find_invalid_utf8(std::string_view text);

// Length of the longest prefix of at most `limit` bytes that does not end inside a sequence.
size_t utf8_prefix(std::string_view text, size_t limit);

}  // namespace twell
