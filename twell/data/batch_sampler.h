// SPDX-License-Identifier: Apache-2.0
// Training sequences as a pure function of (seed, position): nothing to save for a resumed run.
//
// The split's token stream is cut into windows of length + 1 tokens that start length tokens apart:
// the last target of a window is the first input of the next, so every token but the stream's first
// is a target exactly once (up to a last window that is not full). With shuffle, every epoch visits
// all windows once in a fresh pseudo-random order: a keyed permutation, no table.
#pragma once

#include <cstdint>
#include <span>

#include "twell/data/shards.h"

namespace twell {

class BatchSampler {
 public:
  // The shards must outlive this. InputError when the split has less than one window.
  BatchSampler(const ShardSet& shards, Split split, int64_t length, uint64_t seed, bool shuffle);
  int64_t windows() const { return windows_; }
  // Number of the window that sequence `index` reads (0, 1, 2, ... over the whole run).
  int64_t window(int64_t index) const;
  // Fills sequence `index`: inputs [length], targets [length], targets[t] the token after
  // inputs[t].
  void sequence(int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets) const;

 private:
  const ShardSet& shards_;
  Split split_;
  int64_t length_;
  int64_t windows_;
  uint64_t seed_;
  bool shuffle_;
};

// A permutation of [0, n) for each (seed, epoch), evaluated at one place: the image of `index`.
uint64_t permute(uint64_t index, uint64_t n, uint64_t seed, uint64_t epoch);

}  // namespace twell
