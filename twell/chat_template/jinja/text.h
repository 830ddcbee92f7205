// SPDX-License-Identifier: Apache-2.0
// Texts as Python's str sees them: sequences of code points with Unicode's blanks, cases and
// classes. Texts are valid UTF-8; positions and lengths are in code points unless they say bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twell/chat_template/jinja/budget.h"

namespace twell::jinja {

using CodePoint = uint32_t;

// The code point at byte `at`, which moves behind it.
CodePoint next_code_point(std::string_view text, size_t& at);
// The code point before byte `end`, which moves to its start.
CodePoint previous_code_point(std::string_view text, size_t& end);
void append_code_point(std::string& out, CodePoint c);

int64_t count_code_points(std::string_view text);
// Byte offset of each code point and the text's size behind them.
std::vector<uint32_t> offsets(Budget& budget, std::string_view text);

bool is_blank(CodePoint c);       // str.isspace(), and \s of a regular expression
bool is_line_break(CodePoint c);  // of str.splitlines()
bool is_letter(CodePoint c);      // str.isalpha()
bool is_decimal(CodePoint c);     // str.isdecimal()
bool is_numeric(CodePoint c);     // str.isdecimal(), isdigit() or isnumeric()
bool is_printable(CodePoint c);   // str.isprintable()
bool is_word(CodePoint c);        // \w of a regular expression
bool is_cased(CodePoint c);       // has a case: lower, upper or title
bool is_lower(CodePoint c);
bool is_upper(CodePoint c);
bool is_title(CodePoint c);

// Removes blanks at the ends, or, where `set` is given, its code points.
std::string_view strip(Budget& budget, std::string_view text, const std::string* set, bool left,
                       bool right);

std::string upper(Budget& budget, std::string_view text);
std::string lower(Budget& budget, std::string_view text);
std::string case_folded(Budget& budget, std::string_view text);
std::string capitalized(Budget& budget, std::string_view text);
std::string titled(Budget& budget, std::string_view text);  // str.title()
std::string case_swapped(Budget& budget, std::string_view text);

// Byte position of part in text at or behind byte `from`; npos when there is none. Linear in both.
size_t find_text(Budget& budget, std::string_view text, std::string_view part, size_t from = 0);
size_t find_last_text(Budget& budget, std::string_view text, std::string_view part);

// At most `limit` times; negative: all. An empty `from` is found before each code point and at the
// end, as in Python.
std::string replace(Budget& budget, std::string_view text, std::string_view from,
                    std::string_view to, int64_t limit);

// Makes at most `limit` cuts; negative: no limit.
using Parts = std::vector<std::string_view>;
Parts split_at_blanks(Budget& budget, std::string_view text, int64_t limit);
Parts split_at_blanks_from_end(Budget& budget, std::string_view text, int64_t limit);
Parts split(Budget& budget, std::string_view text, std::string_view separator, int64_t limit);
Parts split_from_end(Budget& budget, std::string_view text, std::string_view separator,
                     int64_t limit);
Parts lines(Budget& budget, std::string_view text, bool keep_ends);

// Writes &, <, >, ' and " as references of HTML, as markupsafe does.
std::string html_escaped(Budget& budget, std::string_view text);

}  // namespace twell::jinja
