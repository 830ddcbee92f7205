// SPDX-License-Identifier: Apache-2.0
// String operations on UTF-8 for prompts and their normalisation. They do what Python's str methods
// do because published accuracies were computed with those.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

// Removes white space (Unicode's, as str.isspace defines it): at both ends, or at the end.
std::string_view strip(std::string_view text);
std::string_view strip_end(std::string_view text);

// Puts the first character in title case and the rest in lower case, by Unicode's one-to-one
// mappings: characters that would become several are kept, and sigma has a single lower case.
std::string capitalize(std::string_view text);

// Replaces every `from`, from left to right; `from` must not be empty.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

// The parts between separators; an empty text is one empty part.
std::vector<std::string_view> split_text(std::string_view text, char separator);

// Counts Unicode characters, not bytes.
int64_t count_characters(std::string_view text);

}  // namespace twell
