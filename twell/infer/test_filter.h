// SPDX-License-Identifier: Apache-2.0
// A filter for the tests of this room.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/rng.h"
#include "twell/grammar/token_filter.h"

namespace twell {

// Allows about a third of all tokens, at times a single one, as the tokens so far say; and finds
// that every token it is told of was allowed.
class HashFilter final : public TokenFilter {
 public:
  HashFilter(int64_t vocab, uint64_t seed) : vocab_(vocab), seed_(seed) {}

  bool allows(int32_t id) const {
    uint64_t hash = seed_;
    for (const int32_t one : ids_) hash = hash * 31 + static_cast<uint64_t>(one + 1);
    if (hash % 5 == 0) return id == static_cast<int32_t>(hash % static_cast<uint64_t>(vocab_));
    return uniform_below(hash, 1, static_cast<uint64_t>(id), 3) == 0;
  }
  void accept(uint64_t index, int32_t id) override {
    if (index < ids_.size()) {
      EXPECT_EQ(ids_[index], id);
      return;
    }
    EXPECT_EQ(index, ids_.size());
    EXPECT_TRUE(allows(id)) << "token " << id << ", number " << index;
    ids_.push_back(id);
  }
  void rewind(uint64_t index) override { ids_.resize(std::min<size_t>(ids_.size(), index)); }
  void allowed(std::span<uint32_t> mask) override {
    EXPECT_EQ(std::ssize(mask), token_mask_words(vocab_));
    std::ranges::fill(mask, 0u);
    for (int32_t id = 0; id < vocab_; ++id) {
      if (allows(id)) mask[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
    }
  }
  bool ended() const override { return false; }

 private:
  int64_t vocab_;
  uint64_t seed_;
  std::vector<int32_t> ids_;
};

}  // namespace twell
