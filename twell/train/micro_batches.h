// SPDX-License-Identifier: Apache-2.0
// The token windows of a run: the sequences of each micro-batch and of the validation. They are
// pure functions of the options and the position.
#pragma once

#include <cstdint>
#include <span>

#include "twell/data/batch_sampler.h"
#include "twell/data/shards.h"
#include "twell/train/options.h"

namespace twell {

class MicroBatches {
 public:
  // The options must be resolved; the shards must outlive this object.
  MicroBatches(const ShardSet& shards, const TrainOptions& options);

  // Reads micro-batch `index` of step `step` (from 1): inputs, targets [micro_batch *
  // sequence_length].
  void read(int64_t step, int64_t index, std::span<int32_t> inputs,
            std::span<int32_t> targets) const;

 private:
  int64_t batch_sequences_, micro_batch_;
  size_t length_;
  BatchSampler sampler_;
};

struct ValidationOptions {
  int64_t sequences = 0;  // at most; if fewer than the split has, spread over it
  int64_t length = 0;     // tokens of a sequence
  int64_t micro_batch = 1;
  bool document_mask = false;  // as in TrainOptions
};

class ValidationWindows {
 public:
  // InputError when the split has no window.
  ValidationWindows(const ShardSet& shards, const ValidationOptions& options);

  int64_t sequences() const { return sequences_; }
  // Sequences [begin, begin + count): inputs, targets [count * length].
  void read(int64_t begin, int64_t count, std::span<int32_t> inputs,
            std::span<int32_t> targets) const;

 private:
  BatchSampler sampler_;
  int64_t sequences_;
  size_t length_;
};

}  // namespace twell
