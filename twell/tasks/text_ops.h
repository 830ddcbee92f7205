// SPDX-License-Identifier: Apache-2.0
// The string operations that prompts and their normalisation are defined by, on UTF-8. They do what
// Python's str methods do, because published accuracies were made with those.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace twell {

// Without white space (Unicode's, as str.isspace counts it) at both ends, at the end.
std::string_view strip(std::string_view text);
std::string_view strip_end(std::string_view text);

// The first character in title case, the rest in lower case. By the one-to-one mappings of Unicode:
// characters whose other case is several characters keep theirs, and a sigma has one lower case.
std::string capitalize(std::string_view text);

// Every `from` replaced, from left to right; `from` is not empty.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

// Unicode characters, not bytes.
int64_t count_characters(std::string_view text);

}  // namespace twell
