// SPDX-License-Identifier: Apache-2.0
#include "twell/infer/generated_text.h"

#include <algorithm>
#include <utility>

namespace twell {
namespace {

// Number of bytes at the end of text that start an incomplete UTF-8 character.
size_t incomplete_tail(std::string_view text) {
  const size_t longest = std::min<size_t>(3, text.size());  // a character has at most 4 bytes
  for (size_t n = 1; n <= longest; ++n) {
    const auto byte = static_cast<unsigned char>(text[text.size() - n]);
    if ((byte & 0xC0u) == 0x80u) continue;  // continuation byte: look further back
    const size_t length = byte >= 0xF0u ? 4 : byte >= 0xE0u ? 3 : byte >= 0xC0u ? 2 : 1;
    return length > n ? n : 0;
  }
  return 0;
}

}  // namespace

size_t partial_match(std::string_view text, std::string_view stop) {
  for (size_t n = std::min(text.size(), stop.size() - 1); n > 0; --n) {
    if (text.substr(text.size() - n) == stop.substr(0, n)) return n;
  }
  return 0;
}

GeneratedText::GeneratedText(std::vector<std::string> stop_strings)
    : stop_strings_(std::move(stop_strings)) {
  std::erase(stop_strings_, "");
}

std::string GeneratedText::push(std::string_view bytes) {
  if (stopped_) return {};
  pending_ += bytes;
  size_t first_stop = std::string::npos;
  for (const std::string& stop : stop_strings_) {
    first_stop = std::min(first_stop, pending_.find(stop));
  }
  if (first_stop != std::string::npos) {
    stopped_ = true;
    std::string text = pending_.substr(0, first_stop);
    pending_.clear();
    return text;
  }
  size_t held = incomplete_tail(pending_);
  for (const std::string& stop : stop_strings_) {
    held = std::max(held, partial_match(pending_, stop));
  }
  std::string text = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, text.size());
  return text;
}

std::string GeneratedText::finish() { return std::exchange(pending_, {}); }

}  // namespace twell
