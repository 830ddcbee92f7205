// SPDX-License-Identifier: Apache-2.0
#include "twell/train/micro_batches.h"

#include <algorithm>

namespace twell {

MicroBatches::MicroBatches(const TrainingData& data, const TrainOptions& options)
    : batch_sequences_(options.batch_sequences()),
      micro_batch_(options.micro_batch),
      document_mask_(options.document_mask),
      length_(static_cast<size_t>(options.sequence_length)),
      sampler_(data, Split::kTrain, options.sequence_length, options.seed, true) {}

void MicroBatches::read(int64_t step, int64_t index, std::span<int32_t> inputs,
                        std::span<int32_t> targets, std::vector<int64_t>& documents) const {
  documents.clear();
  const int64_t first = first_of(step) + index * micro_batch_;
  for (int64_t i = 0; i < micro_batch_; ++i) {
    const size_t at = static_cast<size_t>(i) * length_;
    const std::span<int32_t> ids = inputs.subspan(at, length_);
    sampler_.sequence(first + i, ids, targets.subspan(at, length_));
    if (document_mask_) sampler_.add_documents(first + i, ids, documents);
  }
}

int64_t MicroBatches::step_targets(int64_t step) const {
  int64_t targets = 0;
  for (int64_t i = 0; i < batch_sequences_; ++i) targets += sampler_.targets(first_of(step) + i);
  return std::max<int64_t>(targets, 1);
}

ValidationWindows::ValidationWindows(const TrainingData& data, const ValidationOptions& options)
    : document_mask_(options.document_mask),
      sampler_(data, Split::kValidation, options.length, 0, false),
      sequences_(std::min(options.sequences, sampler_.windows())),
      length_(static_cast<size_t>(options.length)) {}

void ValidationWindows::read(int64_t begin, int64_t count, std::span<int32_t> inputs,
                             std::span<int32_t> targets, std::vector<int64_t>& documents) const {
  documents.clear();
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(i) * length_;
    const std::span<int32_t> ids = inputs.subspan(at, length_);
    // Neighbouring windows come from the same few documents, so sample the whole split with a
    // stride.
    const int64_t window = (begin + i) * sampler_.windows() / sequences_;
    sampler_.sequence(window, ids, targets.subspan(at, length_));
    if (document_mask_) sampler_.add_documents(window, ids, documents);
  }
}

}  // namespace twell
