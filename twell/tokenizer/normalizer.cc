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
// Characters that form C leaves alone whatever stands beside them: their combining class is 0,
// they are no second half of a composition, and they are their own form C. Not all there are, but
// most of what is written; the rest takes the slow path, which is always right.
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

bool is_inert(int32_t character) {
  const auto range = std::lower_bound(kInert.begin(), kInert.end(), character,
                                      [](const Range& r, int32_t value) { return r.last < value; });
  return range != kInert.end() && character >= range->first;
}

// Appends the form C of a stretch of valid UTF-8.
void append_nfc(std::string_view text, std::string& out) {
  utf8proc_uint8_t* mapped = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  TWELL_CHECK(size >= 0, "utf8proc failed on {} bytes: {}", text.size(), utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size));
}

// The part of valid UTF-8 text that has to be normalized next: from the last ASCII character before
// the first character that is not inert up to the next ASCII one. ASCII never joins what precedes
// it, so the parts can be normalized apart. Empty, at the end, when there is none.
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
    utf8proc_int32_t character = 0;
    const auto length =
        utf8proc_iterate(bytes + i, static_cast<utf8proc_ssize_t>(text.size() - i), &character);
    TWELL_CHECK(length > 0, "invalid UTF-8 reached the normalizer at byte {}", i);
    if (!is_inert(character)) {
      const auto* end = std::find_if(bytes + i, bytes + text.size(),
                                     [](utf8proc_uint8_t byte) { return byte < 0x80; });
      return {ascii, static_cast<size_t>(end - bytes)};
    }
    i += static_cast<size_t>(length);
  }
  return {text.size(), text.size()};
}

}  // namespace

std::string_view normalize_nfc(std::string_view text, std::string& buffer) {
  buffer.clear();
  size_t kept = 0;  // text[kept, done) is unchanged and not in the buffer yet
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
