// SPDX-License-Identifier: Apache-2.0
// Training sequences as a pure function of (seed, position), so a resumed run needs no saved state.
//
// The split's token stream is cut into windows of length + 1 tokens that start length tokens apart.
// The last target of a window is the first input of the next, so every token but the stream's first
// is a target exactly once; an incomplete last window is dropped. With shuffle, every epoch visits
// all windows once in a new pseudo-random order, computed by a keyed permutation without a table.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/data/shards.h"

namespace twell {

class BatchSampler {
 public:
  // The shards must outlive this. InputError when the split has less than one window.
  BatchSampler(const ShardSet& shards, Split split, int64_t length, uint64_t seed, bool shuffle);
  int64_t windows() const { return windows_; }
  // The window that sequence `index` reads (0, 1, 2, ... over the whole run).
  int64_t window(int64_t index) const;
  // Fills sequence `index`: inputs [length] and targets [length]; targets[t] follows inputs[t].
  void sequence(int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets) const;

 private:
  const ShardSet& shards_;
  Split split_;
  int64_t length_;
  int64_t windows_;
  uint64_t seed_;
  bool shuffle_;
};

// The documents in sequences of `length` tokens that lie one after the other: their lengths, which
// add up to ids.size(). A document ends with an `end` token, and with its sequence.
std::vector<int64_t> document_lengths(std::span<const int32_t> ids, int64_t length, int32_t end);

// The image of `index` under the permutation of [0, n) that (seed, epoch) selects.
uint64_t permute(uint64_t index, uint64_t n, uint64_t seed, uint64_t epoch);

}  // namespace twell
