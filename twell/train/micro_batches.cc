// SPDX-License-Identifier: Apache-2.0
#include "twell/train/micro_batches.h"

#include <algorithm>

namespace twell {

MicroBatches::MicroBatches(const ShardSet& shards, const TrainOptions& options)
    : batch_sequences_(options.batch_sequences()),
      micro_batch_(options.micro_batch),
      length_(static_cast<size_t>(options.sequence_length)),
      sampler_(shards, Split::kTrain, options.sequence_length, options.seed, true) {}

void MicroBatches::read(int64_t step, int64_t index, std::span<int32_t> inputs,
                        std::span<int32_t> targets) const {
  const int64_t first = (step - 1) * batch_sequences_ + index * micro_batch_;
  for (int64_t i = 0; i < micro_batch_; ++i) {
    const size_t at = static_cast<size_t>(i) * length_;
    sampler_.sequence(first + i, inputs.subspan(at, length_), targets.subspan(at, length_));
  }
}

ValidationWindows::ValidationWindows(const ShardSet& shards, const ValidationOptions& options)
    : sampler_(shards, Split::kValidation, options.length, 0, false),
      sequences_(std::min(options.sequences, sampler_.windows())),
      length_(static_cast<size_t>(options.length)) {}

void ValidationWindows::read(int64_t begin, int64_t count, std::span<int32_t> inputs,
                             std::span<int32_t> targets) const {
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(i) * length_;
    // Neighbouring windows come from the same few documents, so sample the whole split with a
    // stride.
    const int64_t window = (begin + i) * sampler_.windows() / sequences_;
    sampler_.sequence(window, inputs.subspan(at, length_), targets.subspan(at, length_));
  }
}

}  // namespace twell
