// SPDX-License-Identifier: Apache-2.0
// The sequences of each micro-batch and of the validation. They are pure functions of the options
// and the position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/data/batch_sampler.h"
#include "twell/data/training_data.h"
#include "twell/train/options.h"

namespace twell {

class MicroBatches {
 public:
  // The options must be resolved; the data must outlive this object.
  MicroBatches(const TrainingData& data, const TrainOptions& options);

  // Reads micro-batch `index` of step `step` (from 1): inputs, targets [micro_batch *
  // sequence_length], and with a document mask the lengths of its documents.
  void read(int64_t step, int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets,
            std::vector<int64_t>& documents) const;
  // Tokens of the whole step that have a target; at least 1.
  int64_t step_targets(int64_t step) const;

 private:
  int64_t first_of(int64_t step) const { return (step - 1) * batch_sequences_; }

  int64_t batch_sequences_, micro_batch_;
  bool document_mask_;
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
  ValidationWindows(const TrainingData& data, const ValidationOptions& options);

  int64_t sequences() const { return sequences_; }
  // Sequences [begin, begin + count): inputs, targets [count * length], and with a document mask
  // the lengths of their documents.
  void read(int64_t begin, int64_t count, std::span<int32_t> inputs, std::span<int32_t> targets,
            std::vector<int64_t>& documents) const;

 private:
  bool document_mask_;
  BatchSampler sampler_;
  int64_t sequences_;
  size_t length_;
};

}  // namespace twell
