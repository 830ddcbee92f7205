// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "twell/base/error.h"
#include "twell/tokenizer/pre_tokenizer.h"

namespace twell {
namespace {

struct Range {
  int32_t first, last;
};
// Characters that form C never changes, whatever their neighbours: their combining class is 0, they
// are not the second half of a composition, and they are their own form C. The list is incomplete
// but covers most text; other characters take the slow path, which is always right.
constexpr std::array<Range, 13> kInert = {{{0x0000, 0x02ff},
                                           {0x0388, 0x0482},
                                           {0x048a, 0x0590},
                                           {0x05d0, 0x05ea},
                                           {0x0620, 0x064a},
                                           {0x0904, 0x0939},
                                           {0x0e01, 0x0e37},
                                           {0x2010, 0x2027},
                                           {0x2030, 0x205e},
                                           {0x3003, 0x3029},
                                           {0x3041, 0x3096},
                                           {0x30a1, 0x9fff},
                                           {0xac00, 0xd7a3}}};

// Combining marks of Unicode 10 and later, and blocks in which its characters compose. Hugging
// Face's `tokenizers` has older tables and neither reorders nor composes them; utf8proc, whose
// version depends on the system, would.
constexpr std::array<Range, 42> kNewer = {
    {{0x07fd, 0x07fd},   {0x0897, 0x089f},   {0x08ca, 0x08d3},   {0x09fe, 0x09fe},
     {0x0c3c, 0x0c3c},   {0x0d3b, 0x0d3c},   {0x0eba, 0x0eba},   {0x1715, 0x1715},
     {0x1abf, 0x1aff},   {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x105c0, 0x105ff},
     {0x10d24, 0x10d27}, {0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10efa, 0x10eff},
     {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b},
     {0x11380, 0x113ff}, {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930},
     {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
     {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
     {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16100, 0x1613f}, {0x16d40, 0x16d7f},
     {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae},
     {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}}};

template <size_t N>
bool is_in(const std::array<Range, N>& ranges, int32_t character) {
  const auto range = std::lower_bound(ranges.begin(), ranges.end(), character,
                                      [](const Range& r, int32_t value) { return r.last < value; });
  return range != ranges.end() && character >= range->first;
}

void append_mapped(std::string_view text, std::string& out) {
  if (text.empty()) return;
  utf8proc_uint8_t* mapped = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  TWELL_CHECK(size >= 0, "utf8proc failed on {} bytes: {}", text.size(), utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size));
}

// Appends the form C of valid UTF-8.
void append_nfc(std::string_view text, std::string& out) {
  size_t done = 0;
  for (size_t i = 0; i < text.size();) {
    const auto [code, size] = first_character(text.substr(i));
    if (is_in(kNewer, code)) {
      append_mapped(text.substr(done, i - done), out);
      out += text.substr(i, size);
      done = i + size;
    }
    i += size;
  }
  append_mapped(text.substr(done), out);
}

// The next part of valid UTF-8 text to normalize: from the last ASCII character before the first
// character that is not inert up to the next ASCII one. ASCII never combines with what precedes it,
// so the parts can be normalized separately. Empty, at the end of the text, when none is left.
struct Part {
  size_t begin, end;
};
Part next_part(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  size_t ascii = 0;
  for (size_t i = 0; i < text.size();) {
    if (bytes[i] < 0x80) {
      ascii = i++;
      continue;
    }
    const auto [code, size] = first_character(text.substr(i));
    if (!is_in(kInert, code)) {
      const auto* end = std::find_if(bytes + i, bytes + text.size(),
                                     [](utf8proc_uint8_t byte) { return byte < 0x80; });
      return {ascii, static_cast<size_t>(end - bytes)};
    }
    i += size;
  }
  return {text.size(), text.size()};
}

}  // namespace

Character first_character(std::string_view text) {
  Character out;
  const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                     static_cast<utf8proc_ssize_t>(text.size()), &out.code);
  if (size > 0) out.size = static_cast<size_t>(size);
  return out;
}

bool is_white_space(int32_t character) {
  const utf8proc_category_t category = utf8proc_category(character);
  return (character >= '\t' && character <= '\r') || character == 0x85 ||
         category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

bool is_word_character(int32_t character) {
  switch (utf8proc_category(character)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  // The joiners, and letters in circles and squares.
  return character == 0x200C || character == 0x200D ||
         (character >= 0x24B6 && character <= 0x24E9) ||
         (character >= 0x1F130 && character <= 0x1F149) ||
         (character >= 0x1F150 && character <= 0x1F169) ||
         (character >= 0x1F170 && character <= 0x1F189);
}

bool is_unknown_to_reference(int32_t character) { return is_in(kNewer, character); }

std::string_view normalize_nfc(std::string_view text, std::string& buffer) {
  buffer.clear();
  size_t kept = 0;  // text[kept, done) is unchanged and not yet in the buffer
  size_t done = 0;
  while (done < text.size()) {
    const Utf8Stretch stretch = next_utf8_stretch(text.substr(done));
    const size_t end = done + stretch.size;
    while (stretch.valid && done < end) {
      const Part part = next_part(text.substr(done, end - done));
      const size_t begin = done + part.begin;
      done += part.end;
      if (part.begin == part.end) break;
      buffer += text.substr(kept, begin - kept);
      append_nfc(text.substr(begin, done - begin), buffer);
      kept = done;
    }
    done = end;
  }
  if (kept == 0) return text;
  buffer += text.substr(kept);
  return buffer;
}

}  // namespace twell
