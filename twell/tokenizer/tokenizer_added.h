// SPDX-License-Identifier: Apache-2.0
// Finds added tokens in a text: the leftmost match, and the longest of those that start there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace twell {

class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin = 0, end = 0;
    int32_t id = -1;
  };

  void add(std::string_view content, int32_t id);
  bool empty() const { return nodes_.size() == 1; }
  // Finds the first match at or after `from`; returns false when there is none.
  bool find(std::string_view text, size_t from, Match& match) const;

 private:
  // A trie over bytes; node 0 is the root.
  struct Node {
    int32_t id = -1;                                     // id of the token that ends here, or -1
    std::vector<std::pair<uint8_t, uint32_t>> children;  // by byte
  };
  uint32_t child(uint32_t node, uint8_t byte) const;  // 0 when it does not exist

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> starts_{};  // whether some token begins with the byte
};

}  // namespace twell
