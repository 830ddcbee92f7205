// SPDX-License-Identifier: Apache-2.0
// Training sequences as a pure function of (seed, position), so a resumed run needs no saved state.
// With shuffle, every epoch visits all sequences of a split once in a new pseudo-random order,
// computed by a keyed permutation without a table.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/data/training_data.h"

namespace twell {

class BatchSampler {
 public:
  // The data must outlive this. InputError when the split has less than one window.
  BatchSampler(const TrainingData& data, Split split, int64_t length, uint64_t seed, bool shuffle);
  int64_t windows() const { return windows_; }
  // The window that sequence `index` reads (0, 1, 2, ... over the whole run).
  int64_t window(int64_t index) const;
  // Fills sequence `index`: inputs [length] and targets [length] (TrainingData::read_sequence).
  void sequence(int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets) const;
  // Appends the lengths of its documents.
  void add_documents(int64_t index, std::span<const int32_t> inputs,
                     std::vector<int64_t>& lengths) const;
  int64_t targets(int64_t index) const;  // its tokens with a target

 private:
  const TrainingData& data_;
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
