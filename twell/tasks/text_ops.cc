// SPDX-License-Identifier: Apache-2.0
#include "twell/tasks/text_ops.h"

#include <utf8proc.h>

#include <algorithm>

#include "twell/tokenizer/normalizer.h"

namespace twell {
namespace {

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0u) == 0x80u; }

// White_Space, and four control characters.
bool is_space(int32_t code) { return is_white_space(code) || (code >= 0x1c && code <= 0x1f); }

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
    text.remove_prefix(first.size);
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
    text.remove_prefix(next.size);
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

std::vector<std::string_view> split_text(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t end; (end = text.find(separator)) != std::string_view::npos;) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char byte) { return !is_continuation(byte); });
}

}  // namespace twell
