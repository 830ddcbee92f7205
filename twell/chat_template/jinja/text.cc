// SPDX-License-Identifier: Apache-2.0
#include "twell/chat_template/jinja/text.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>

namespace twell::jinja {
namespace {

constexpr size_t kSearchOverhead = 32;  // bytes that are copied in the time of an empty search

bool continues(char c) { return (c & 0xc0) == 0x80; }

utf8proc_category_t category(CodePoint c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

bool in_set(const std::vector<CodePoint>& set, CodePoint c) {
  return std::binary_search(set.begin(), set.end(), c);
}

// Appends the lines' or cuts' last part and reverses cuts that were made from the end.
Parts reversed(Parts parts) {
  std::reverse(parts.begin(), parts.end());
  return parts;
}

}  // namespace

CodePoint next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) -> CodePoint {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0x80U;
  };
  const CodePoint first = byte(at);
  if (first < 0x80) return ++at, first;
  const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
  CodePoint c = first & (0x3fU >> more);
  for (int i = 1; i <= more; ++i) c = (c << 6) | (byte(at + static_cast<size_t>(i)) & 0x3fU);
  at = std::min(at + 1 + static_cast<size_t>(more), text.size());
  return c;
}

CodePoint previous_code_point(std::string_view text, size_t& end) {
  --end;
  while (end > 0 && continues(text[end])) --end;
  size_t at = end;
  return next_code_point(text, at);
}

void append_code_point(std::string& out, CodePoint c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
    return;
  }
  char bytes[4];
  const auto size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c),
                                         reinterpret_cast<utf8proc_uint8_t*>(bytes));
  out.append(bytes, static_cast<size_t>(size));
}

int64_t count_code_points(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return !continues(c); });
}

std::vector<uint32_t> offsets(Budget& budget, std::string_view text) {
  budget.bytes((text.size() + 1) * sizeof(uint32_t));
  std::vector<uint32_t> out;
  out.reserve(text.size() + 1);
  for (size_t i = 0; i < text.size(); ++i) {
    if (!continues(text[i])) out.push_back(static_cast<uint32_t>(i));
  }
  out.push_back(static_cast<uint32_t>(text.size()));
  return out;
}

bool is_blank(CodePoint c) {
  if (c < 0x80) return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
         c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_line_break(CodePoint c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

bool is_letter(CodePoint c) {
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO;
}
bool is_decimal(CodePoint c) { return category(c) == UTF8PROC_CATEGORY_ND; }
bool is_numeric(CodePoint c) {
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_ND || kind == UTF8PROC_CATEGORY_NL ||
         kind == UTF8PROC_CATEGORY_NO;
}
bool is_printable(CodePoint c) {
  if (c < 0x7f) return c >= 0x20;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
      return false;
    default:
      return true;
  }
}
bool is_word(CodePoint c) { return c == '_' || is_letter(c) || is_numeric(c); }

std::string_view strip(Budget& budget, std::string_view text, const std::string* set, bool left,
                       bool right) {
  std::vector<CodePoint> stripped;
  if (set != nullptr) {
    budget.bytes(set->size() * sizeof(CodePoint));
    for (size_t at = 0; at < set->size();) stripped.push_back(next_code_point(*set, at));
    std::sort(stripped.begin(), stripped.end());
  }
  const auto drop = [&](CodePoint c) { return set != nullptr ? in_set(stripped, c) : is_blank(c); };
  budget.bytes(text.size());
  size_t begin = 0, end = text.size();
  for (size_t at = 0; left && begin < end; begin = at) {
    if (!drop(next_code_point(text, at))) break;
  }
  for (size_t at = end; right && begin < end; end = at) {
    if (!drop(previous_code_point(text, at))) break;
  }
  return text.substr(begin, end - begin);
}

// memmem is linear in both sizes, unlike std::string::find.
size_t find_text(Budget& budget, std::string_view text, std::string_view part, size_t from) {
  budget.bytes(kSearchOverhead + part.size());
  if (from > text.size()) return std::string::npos;
  if (part.empty()) return from;
  const char* begin = text.data() + from;
  const size_t size = text.size() - from;
  // AddressSanitizer checks all of the text in every memmem, but only what memchr reads.
  const void* found = part.size() == 1 ? std::memchr(begin, part.front(), size)
                                       : ::memmem(begin, size, part.data(), part.size());
  const size_t at = found == nullptr
                        ? std::string::npos
                        : static_cast<size_t>(static_cast<const char*>(found) - text.data());
  budget.bytes(std::min(at, text.size()) - from);
  return at;
}

size_t find_last_text(Budget& budget, std::string_view text, std::string_view part) {
  // Reversed, so that the linear search can be used.
  budget.bytes(2 * (text.size() + part.size()));
  const std::string back(text.rbegin(), text.rend()), wanted(part.rbegin(), part.rend());
  const size_t at = find_text(budget, back, wanted);
  return at == std::string::npos ? at : text.size() - at - part.size();
}

std::string replace(Budget& budget, std::string_view text, std::string_view from,
                    std::string_view to, int64_t limit) {
  std::string out;
  if (from.empty()) {
    for (size_t at = 0; limit != 0; --limit) {
      budget.append(out, to);
      if (at == text.size()) return out;
      const size_t begin = at;
      next_code_point(text, at);
      budget.append(out, text.substr(begin, at - begin));
      if (limit == 1) {
        budget.append(out, text.substr(at));
        return out;
      }
    }
    budget.append(out, text);
    return out;
  }
  size_t begin = 0;
  for (size_t at; limit != 0 && (at = find_text(budget, text, from, begin)) != std::string::npos;
       --limit) {
    budget.append(out, text.substr(begin, at - begin));
    budget.append(out, to);
    begin = at + from.size();
  }
  budget.append(out, text.substr(begin));
  return out;
}

Parts split_at_blanks(Budget& budget, std::string_view text, int64_t limit) {
  budget.bytes(text.size());
  Parts out;
  size_t at = 0;
  while (true) {
    size_t begin = at;
    while (begin < text.size()) {
      at = begin;
      if (!is_blank(next_code_point(text, at))) break;
      begin = at;
    }
    if (begin >= text.size()) return out;
    budget.bytes(sizeof(std::string_view));
    if (limit-- == 0) {
      out.push_back(strip(budget, text.substr(begin), nullptr, false, true));
      return out;
    }
    size_t end = begin;
    while (end < text.size()) {
      at = end;
      if (is_blank(next_code_point(text, at))) break;
      end = at;
    }
    out.push_back(text.substr(begin, end - begin));
    at = end;
  }
}

Parts split_at_blanks_from_end(Budget& budget, std::string_view text, int64_t limit) {
  budget.bytes(text.size());
  Parts out;
  size_t at = text.size();
  while (true) {
    size_t end = at;
    while (end > 0) {
      at = end;
      if (!is_blank(previous_code_point(text, at))) break;
      end = at;
    }
    if (end == 0) return reversed(std::move(out));
    budget.bytes(sizeof(std::string_view));
    if (limit-- == 0) {
      out.push_back(strip(budget, text.substr(0, end), nullptr, true, false));
      return reversed(std::move(out));
    }
    size_t begin = end;
    while (begin > 0) {
      at = begin;
      if (is_blank(previous_code_point(text, at))) break;
      begin = at;
    }
    out.push_back(text.substr(begin, end - begin));
    at = begin;
  }
}

Parts split(Budget& budget, std::string_view text, std::string_view separator, int64_t limit) {
  TWELL_REQUIRE(!separator.empty(), "split needs a separator that is not empty");
  Parts out;
  size_t begin = 0;
  for (size_t at;
       limit != 0 && (at = find_text(budget, text, separator, begin)) != std::string::npos;
       --limit) {
    budget.bytes(sizeof(std::string_view));
    out.push_back(text.substr(begin, at - begin));
    begin = at + separator.size();
  }
  out.push_back(text.substr(begin));
  return out;
}

Parts split_from_end(Budget& budget, std::string_view text, std::string_view separator,
                     int64_t limit) {
  if (limit < 0 && separator.size() == 1) return split(budget, text, separator, limit);
  TWELL_REQUIRE(!separator.empty(), "rsplit needs a separator that is not empty");
  budget.bytes(2 * (text.size() + separator.size()));
  const std::string back(text.rbegin(), text.rend()), mark(separator.rbegin(), separator.rend());
  Parts out;
  size_t end = text.size();
  size_t begin = 0;  // in `back`
  for (size_t at; limit != 0 && (at = find_text(budget, back, mark, begin)) != std::string::npos;
       --limit) {
    budget.bytes(sizeof(std::string_view));
    const size_t after = text.size() - at;
    out.push_back(text.substr(after, end - after));
    end = after - separator.size();
    begin = at + mark.size();
  }
  out.push_back(text.substr(0, end));
  return reversed(std::move(out));
}

Parts lines(Budget& budget, std::string_view text, bool keep_ends) {
  budget.bytes(text.size());
  Parts out;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = at;
    const CodePoint c = next_code_point(text, at);
    if (!is_line_break(c)) continue;
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    budget.bytes(sizeof(std::string_view));
    out.push_back(text.substr(begin, (keep_ends ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) out.push_back(text.substr(begin));
  return out;
}

std::string html_escaped(Budget& budget, std::string_view text) {
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t at = std::min(text.find_first_of("&<>'\"", begin), text.size());
    budget.append(out, text.substr(begin, at - begin));
    if (at == text.size()) break;
    constexpr std::string_view kNames[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    budget.append(out, kNames[std::string_view("&<>'\"").find(text[at])]);
    begin = at + 1;
  }
  return out;
}

}  // namespace twell::jinja
