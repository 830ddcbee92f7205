// SPDX-License-Identifier: Apache-2.0
// What a model is trained on, as sequences of a fixed length: text (shards.h), conversations
// (chat_data.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twell/data/shard_manifest.h"

namespace twell {

// Immutable; several threads may read at once.
class TrainingData {
 public:
  virtual ~TrainingData() = default;

  virtual int64_t tokens(Split split) const = 0;
  // Sequences of `length` tokens that the split has.
  virtual int64_t sequences(Split split, int64_t length) const = 0;
  // Fills sequence `index`: inputs [length], and targets [length], each the token that follows its
  // input, or -1 where nothing is learned.
  virtual void read_sequence(Split split, int64_t index, std::span<int32_t> inputs,
                             std::span<int32_t> targets) const = 0;
  // Appends the lengths of the documents in sequence `index`, whose inputs were read: they add up
  // to its length, and attention may stay within each.
  virtual void add_documents(Split split, int64_t index, std::span<const int32_t> inputs,
                             std::vector<int64_t>& lengths) const = 0;
  // The tokens of sequence `index` that have a target.
  virtual int64_t targets(Split split, int64_t index, int64_t length) const = 0;
  // Tells this data from other data. A run goes on with the same alone.
  virtual std::string identity() const = 0;
};

}  // namespace twell
