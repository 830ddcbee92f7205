// SPDX-License-Identifier: Apache-2.0
#include "twell/tokenizer/tokenizer_added.h"

#include <algorithm>

namespace twell {
namespace {

bool is_before(const std::pair<uint8_t, uint32_t>& child, uint8_t byte) {
  return child.first < byte;
}

}  // namespace

uint32_t AddedTokenMatcher::child(uint32_t node, uint8_t byte) const {
  const auto& children = nodes_[node].children;
  const auto it = std::lower_bound(children.begin(), children.end(), byte, is_before);
  return it == children.end() || it->first != byte ? 0 : it->second;
}

void AddedTokenMatcher::add(std::string_view content, int32_t id) {
  uint32_t node = 0;
  for (const char c : content) {
    const uint8_t byte = static_cast<uint8_t>(c);
    uint32_t next = child(node, byte);
    if (next == 0) {
      next = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
      auto& children = nodes_[node].children;
      const auto place = std::lower_bound(children.begin(), children.end(), byte, is_before);
      children.insert(place, {byte, next});
    }
    node = next;
  }
  nodes_[node].id = id;
  starts_[static_cast<uint8_t>(content[0])] = true;
}

bool AddedTokenMatcher::find(std::string_view text, size_t from, Match& match) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<uint8_t>(text[begin])]) continue;
    match.id = -1;
    uint32_t node = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      node = child(node, static_cast<uint8_t>(text[i]));
      if (node == 0) break;
      if (nodes_[node].id >= 0) match = {begin, i + 1, nodes_[node].id};
    }
    if (match.id >= 0) return true;
  }
  return false;
}

}  // namespace twell
