// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/text_ops.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

namespace twell {
namespace {

struct Character {
  int32_t code = 0;
  size_t bytes = 1;
};

// The first character of a non-empty text. An invalid first byte gives code -1 and length 1.
Character first_character(std::string_view text) {
  Character out;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const utf8proc_ssize_t used =
      utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size()), &out.code);
  if (used > 0) {
    out.bytes = static_cast<size_t>(used);
  } else {
    out.code = -1;
  }
  return out;
}

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0u) == 0x80u; }

bool is_space(int32_t code) {
  if (code >= 0x2000 && code <= 0x200A) return true;
  constexpr std::array<int32_t, 18> kSpaces = {0x09,   0x0A,   0x0B,   0x0C,   0x0D,   0x1C,
                                               0x1D,   0x1E,   0x1F,   0x20,   0x85,   0xA0,
                                               0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000};
  return std::find(kSpaces.begin(), kSpaces.end(), code) != kSpaces.end();
}

void append(std::string& out, int32_t code) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t count = utf8proc_encode_char(code, bytes);
  out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
}

}  // namespace

std::string_view strip_end(std::string_view text) {
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && is_continuation(text[begin])) --begin;
    if (!is_space(first_character(text.substr(begin)).code)) break;
    text.remove_suffix(text.size() - begin);
  }
  return text;
}

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const Character first = first_character(text);
    if (!is_space(first.code)) break;
    text.remove_prefix(first.bytes);
  }
  return strip_end(text);
}

std::string capitalize(std::string_view text) {
  std::string out;
  for (bool first = true; !text.empty(); first = false) {
    const Character next = first_character(text);
    if (next.code < 0) {
      out += text.front();
    } else {
      append(out, first ? utf8proc_totitle(next.code) : utf8proc_tolower(next.code));
    }
    text.remove_prefix(next.bytes);
  }
  return out;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from)) {
    out.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
  }
  return out.append(text);
}

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char byte) { return !is_continuation(byte); });
}

}  // namespace twell
