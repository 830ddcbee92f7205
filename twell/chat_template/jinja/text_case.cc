// SPDX-License-Identifier: Apache-2.0
// Upper, lower and title case as Python's str has them: with the characters that become several.
#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "twell/chat_template/jinja/text.h"

namespace twell::jinja {
namespace {

// Every character whose upper or title case has several characters, from Unicode's SpecialCasing.
struct LongCase {
  CodePoint c;
  const char* upper;
  const char* title;
};
constexpr LongCase kLongCases[] = {
    {0x00df, "SS", "Ss"},
    {0x0149, "\u02bcN", "\u02bcN"},
    {0x01f0, "J\u030c", "J\u030c"},
    {0x0390, "\u0399\u0308\u0301", "\u0399\u0308\u0301"},
    {0x03b0, "\u03a5\u0308\u0301", "\u03a5\u0308\u0301"},
    {0x0587, "\u0535\u0552", "\u0535\u0582"},
    {0x1e96, "H\u0331", "H\u0331"},
    {0x1e97, "T\u0308", "T\u0308"},
    {0x1e98, "W\u030a", "W\u030a"},
    {0x1e99, "Y\u030a", "Y\u030a"},
    {0x1e9a, "A\u02be", "A\u02be"},
    {0x1f50, "\u03a5\u0313", "\u03a5\u0313"},
    {0x1f52, "\u03a5\u0313\u0300", "\u03a5\u0313\u0300"},
    {0x1f54, "\u03a5\u0313\u0301", "\u03a5\u0313\u0301"},
    {0x1f56, "\u03a5\u0313\u0342", "\u03a5\u0313\u0342"},
    {0x1f80, "\u1f08\u0399", "\u1f88"},
    {0x1f81, "\u1f09\u0399", "\u1f89"},
    {0x1f82, "\u1f0a\u0399", "\u1f8a"},
    {0x1f83, "\u1f0b\u0399", "\u1f8b"},
    {0x1f84, "\u1f0c\u0399", "\u1f8c"},
    {0x1f85, "\u1f0d\u0399", "\u1f8d"},
    {0x1f86, "\u1f0e\u0399", "\u1f8e"},
    {0x1f87, "\u1f0f\u0399", "\u1f8f"},
    {0x1f88, "\u1f08\u0399", "\u1f88"},
    {0x1f89, "\u1f09\u0399", "\u1f89"},
    {0x1f8a, "\u1f0a\u0399", "\u1f8a"},
    {0x1f8b, "\u1f0b\u0399", "\u1f8b"},
    {0x1f8c, "\u1f0c\u0399", "\u1f8c"},
    {0x1f8d, "\u1f0d\u0399", "\u1f8d"},
    {0x1f8e, "\u1f0e\u0399", "\u1f8e"},
    {0x1f8f, "\u1f0f\u0399", "\u1f8f"},
    {0x1f90, "\u1f28\u0399", "\u1f98"},
    {0x1f91, "\u1f29\u0399", "\u1f99"},
    {0x1f92, "\u1f2a\u0399", "\u1f9a"},
    {0x1f93, "\u1f2b\u0399", "\u1f9b"},
    {0x1f94, "\u1f2c\u0399", "\u1f9c"},
    {0x1f95, "\u1f2d\u0399", "\u1f9d"},
    {0x1f96, "\u1f2e\u0399", "\u1f9e"},
    {0x1f97, "\u1f2f\u0399", "\u1f9f"},
    {0x1f98, "\u1f28\u0399", "\u1f98"},
    {0x1f99, "\u1f29\u0399", "\u1f99"},
    {0x1f9a, "\u1f2a\u0399", "\u1f9a"},
    {0x1f9b, "\u1f2b\u0399", "\u1f9b"},
    {0x1f9c, "\u1f2c\u0399", "\u1f9c"},
    {0x1f9d, "\u1f2d\u0399", "\u1f9d"},
    {0x1f9e, "\u1f2e\u0399", "\u1f9e"},
    {0x1f9f, "\u1f2f\u0399", "\u1f9f"},
    {0x1fa0, "\u1f68\u0399", "\u1fa8"},
    {0x1fa1, "\u1f69\u0399", "\u1fa9"},
    {0x1fa2, "\u1f6a\u0399", "\u1faa"},
    {0x1fa3, "\u1f6b\u0399", "\u1fab"},
    {0x1fa4, "\u1f6c\u0399", "\u1fac"},
    {0x1fa5, "\u1f6d\u0399", "\u1fad"},
    {0x1fa6, "\u1f6e\u0399", "\u1fae"},
    {0x1fa7, "\u1f6f\u0399", "\u1faf"},
    {0x1fa8, "\u1f68\u0399", "\u1fa8"},
    {0x1fa9, "\u1f69\u0399", "\u1fa9"},
    {0x1faa, "\u1f6a\u0399", "\u1faa"},
    {0x1fab, "\u1f6b\u0399", "\u1fab"},
    {0x1fac, "\u1f6c\u0399", "\u1fac"},
    {0x1fad, "\u1f6d\u0399", "\u1fad"},
    {0x1fae, "\u1f6e\u0399", "\u1fae"},
    {0x1faf, "\u1f6f\u0399", "\u1faf"},
    {0x1fb2, "\u1fba\u0399", "\u1fba\u0345"},
    {0x1fb3, "\u0391\u0399", "\u1fbc"},
    {0x1fb4, "\u0386\u0399", "\u0386\u0345"},
    {0x1fb6, "\u0391\u0342", "\u0391\u0342"},
    {0x1fb7, "\u0391\u0342\u0399", "\u0391\u0342\u0345"},
    {0x1fbc, "\u0391\u0399", "\u1fbc"},
    {0x1fc2, "\u1fca\u0399", "\u1fca\u0345"},
    {0x1fc3, "\u0397\u0399", "\u1fcc"},
    {0x1fc4, "\u0389\u0399", "\u0389\u0345"},
    {0x1fc6, "\u0397\u0342", "\u0397\u0342"},
    {0x1fc7, "\u0397\u0342\u0399", "\u0397\u0342\u0345"},
    {0x1fcc, "\u0397\u0399", "\u1fcc"},
    {0x1fd2, "\u0399\u0308\u0300", "\u0399\u0308\u0300"},
    {0x1fd3, "\u0399\u0308\u0301", "\u0399\u0308\u0301"},
    {0x1fd6, "\u0399\u0342", "\u0399\u0342"},
    {0x1fd7, "\u0399\u0308\u0342", "\u0399\u0308\u0342"},
    {0x1fe2, "\u03a5\u0308\u0300", "\u03a5\u0308\u0300"},
    {0x1fe3, "\u03a5\u0308\u0301", "\u03a5\u0308\u0301"},
    {0x1fe4, "\u03a1\u0313", "\u03a1\u0313"},
    {0x1fe6, "\u03a5\u0342", "\u03a5\u0342"},
    {0x1fe7, "\u03a5\u0308\u0342", "\u03a5\u0308\u0342"},
    {0x1ff2, "\u1ffa\u0399", "\u1ffa\u0345"},
    {0x1ff3, "\u03a9\u0399", "\u1ffc"},
    {0x1ff4, "\u038f\u0399", "\u038f\u0345"},
    {0x1ff6, "\u03a9\u0342", "\u03a9\u0342"},
    {0x1ff7, "\u03a9\u0342\u0399", "\u03a9\u0342\u0345"},
    {0x1ffc, "\u03a9\u0399", "\u1ffc"},
    {0xfb00, "FF", "Ff"},
    {0xfb01, "FI", "Fi"},
    {0xfb02, "FL", "Fl"},
    {0xfb03, "FFI", "Ffi"},
    {0xfb04, "FFL", "Ffl"},
    {0xfb05, "ST", "St"},
    {0xfb06, "ST", "St"},
    {0xfb13, "\u0544\u0546", "\u0544\u0576"},
    {0xfb14, "\u0544\u0535", "\u0544\u0565"},
    {0xfb15, "\u0544\u053b", "\u0544\u056b"},
    {0xfb16, "\u054e\u0546", "\u054e\u0576"},
    {0xfb17, "\u0544\u053d", "\u0544\u056d"},
};

const LongCase* find_long_case(CodePoint c) {
  const auto* found =
      std::lower_bound(std::begin(kLongCases), std::end(kLongCases), c,
                       [](const LongCase& row, CodePoint value) { return row.c < value; });
  return found != std::end(kLongCases) && found->c == c ? found : nullptr;
}

void append_simple(std::string& out, CodePoint c, utf8proc_int32_t (*change)(utf8proc_int32_t)) {
  append_code_point(out, static_cast<CodePoint>(change(static_cast<utf8proc_int32_t>(c))));
}

void append_upper(std::string& out, CodePoint c) {
  const LongCase* found = find_long_case(c);
  if (found != nullptr) {
    out += found->upper;
  } else {
    append_simple(out, c, utf8proc_toupper);
  }
}

void append_title(std::string& out, CodePoint c) {
  const LongCase* found = find_long_case(c);
  if (found != nullptr) {
    out += found->title;
  } else {
    append_simple(out, c, utf8proc_totitle);
  }
}

// Characters that a word's case does not depend on: accents, apostrophes and the like.
bool is_case_ignorable(CodePoint c) {
  if (c == '\'' || c == '.' || c == ':' || c == 0xb7 || c == 0x2018 || c == 0x2019 || c == 0x2024 ||
      c == 0x2027) {
    return true;
  }
  const auto kind = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_ME ||
         kind == UTF8PROC_CATEGORY_CF || kind == UTF8PROC_CATEGORY_LM ||
         kind == UTF8PROC_CATEGORY_SK;
}

// Whether the capital sigma between bytes `begin` and `end` ends a word.
bool ends_word(std::string_view text, size_t begin, size_t end) {
  while (begin > 0) {
    const CodePoint c = previous_code_point(text, begin);
    if (is_case_ignorable(c)) continue;
    if (!is_cased(c)) return false;
    while (end < text.size()) {
      const CodePoint next = next_code_point(text, end);
      if (!is_case_ignorable(next)) return !is_cased(next);
    }
    return true;
  }
  return false;
}

void append_lower(std::string& out, std::string_view text, size_t begin, size_t end, CodePoint c) {
  constexpr CodePoint kCapitalSigma = 0x3a3, kFinalSigma = 0x3c2, kDottedI = 0x130;
  if (c == kDottedI) {
    out += "i\u0307";
  } else if (c == kCapitalSigma && ends_word(text, begin, end)) {
    append_code_point(out, kFinalSigma);
  } else {
    append_simple(out, c, utf8proc_tolower);
  }
}

constexpr size_t kGrowth = 8;  // a character becomes at most three, and is looked up

// Calls change(c, begin, end, out) for every code point of the text.
template <typename Change>
std::string changed(Budget& budget, std::string_view text, const Change& change) {
  budget.bytes(kGrowth * text.size());
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const CodePoint c = next_code_point(text, at);
    change(c, begin, at, out);
  }
  return out;
}

}  // namespace

bool is_lower(CodePoint c) {
  if (c < 0x80) return c >= 'a' && c <= 'z';
  return utf8proc_islower(static_cast<utf8proc_int32_t>(c)) != 0;
}
bool is_upper(CodePoint c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z';
  return utf8proc_isupper(static_cast<utf8proc_int32_t>(c)) != 0;
}
bool is_title(CodePoint c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_LT;
}
bool is_cased(CodePoint c) { return is_lower(c) || is_upper(c) || is_title(c); }

std::string upper(Budget& budget, std::string_view text) {
  return changed(budget, text,
                 [](CodePoint c, size_t, size_t, std::string& out) { append_upper(out, c); });
}

std::string lower(Budget& budget, std::string_view text) {
  return changed(budget, text, [&](CodePoint c, size_t begin, size_t end, std::string& out) {
    append_lower(out, text, begin, end, c);
  });
}

std::string case_folded(Budget& budget, std::string_view text) {
  return changed(budget, text, [](CodePoint c, size_t, size_t, std::string& out) {
    utf8proc_int32_t folded[8];
    int boundary = 0;
    const auto size = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), folded, 8,
                                              UTF8PROC_CASEFOLD, &boundary);
    if (size <= 0 || size > 8) return append_code_point(out, c);
    for (int64_t i = 0; i < size; ++i) append_code_point(out, static_cast<CodePoint>(folded[i]));
  });
}

std::string capitalized(Budget& budget, std::string_view text) {
  return changed(budget, text, [&](CodePoint c, size_t begin, size_t end, std::string& out) {
    if (begin == 0) {
      append_title(out, c);
    } else {
      append_lower(out, text, begin, end, c);
    }
  });
}

std::string titled(Budget& budget, std::string_view text) {
  bool in_word = false;
  return changed(budget, text, [&](CodePoint c, size_t begin, size_t end, std::string& out) {
    if (in_word) {
      append_lower(out, text, begin, end, c);
    } else {
      append_title(out, c);
    }
    in_word = is_cased(c);
  });
}

std::string case_swapped(Budget& budget, std::string_view text) {
  return changed(budget, text, [&](CodePoint c, size_t begin, size_t end, std::string& out) {
    if (is_upper(c)) {
      append_lower(out, text, begin, end, c);
    } else if (is_lower(c)) {
      append_upper(out, c);
    } else {
      append_code_point(out, c);
    }
  });
}

}  // namespace twell::jinja
