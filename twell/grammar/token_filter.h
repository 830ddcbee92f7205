// SPDX-License-Identifier: Apache-2.0
// Which tokens may come next in a sequence: what a sampler asks at every step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace twell {

// Words of a mask: bit id % 32 of word id / 32 says whether the next token may be id.
constexpr int64_t token_mask_words(int64_t vocab) { return (vocab + 31) / 32; }
inline bool mask_allows(std::span<const uint32_t> mask, int64_t id) {
  return ((mask[static_cast<size_t>(id / 32)] >> (id % 32)) & 1u) != 0;
}

// The state of one sequence. One thread uses it at a time.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  // Token number `index` of the new text (from 0 on) is id. No effect if it was taken already, so
  // that both who draws a token and who reports it may tell. Tokens are told in their order.
  virtual void accept(uint64_t index, int32_t id) = 0;
  // Forgets the tokens from this number on.
  virtual void rewind(uint64_t index) = 0;
  // Writes the mask of the next token, token_mask_words() of the vocabulary; bits beyond it are 0.
  // All bits are set once the text has ended, and none where no token continues it.
  virtual void allowed(std::span<uint32_t> mask) = 0;
  // Whether the text has ended although no end token was drawn.
  virtual bool ended() const = 0;
};

}  // namespace twell
