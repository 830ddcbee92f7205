// SPDX-License-Identifier: Apache-2.0
// Tokenized text on disk: a folder with manifest.json and memory-mapped shards of token ids
// (little-endian u16 when the vocabulary allows, else u32), EOS after every document, split into
// train and validation by document.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "twell/base/file.h"
#include "twell/data/text_source.h"
#include "twell/data/tokenizer.h"

namespace twell {

struct TokenizeOptions {
  double validation_fraction = 0.01;  // of documents, picked by a hash of their index and seed
  int64_t shard_tokens = int64_t{1} << 26;
  uint64_t seed = 0;
  int threads = 0;
  std::function<void(int64_t bytes_read, int64_t total_bytes, int64_t tokens)> progress;
};
struct ShardCounts {
  int64_t documents = 0, train_tokens = 0, validation_tokens = 0, text_bytes = 0,
          validation_text_bytes = 0;
};
// Writes the shard set atomically: the folder is complete or absent. InputError when the text holds
// no tokens for one of the splits.
ShardCounts write_shards(TextSource& source, const Tokenizer& tokenizer,
                         const std::filesystem::path& folder, const TokenizeOptions& options);

enum class Split { kTrain, kValidation };

class ShardSet {
 public:
  // Checks the manifest against the files (sizes) and against the tokenizer's hash.
  ShardSet(const std::filesystem::path& folder, const Tokenizer& tokenizer);
  const ShardCounts& counts() const;
  int64_t tokens(Split split) const;
  // Copies ids [begin, begin + out.size()) of the split's token stream.
  void read(Split split, int64_t begin, std::span<int32_t> out) const;

 private:
  ShardCounts counts_;
  std::vector<MappedFile> files_;
  // ...
};

// Batches as a pure function of (seed, position): the stream is cut into windows of length + 1
// tokens, every epoch visits all windows once in a fresh pseudo-random order (a keyed permutation,
// no table). Validation reads windows in order.
class BatchSampler {
 public:
  BatchSampler(const ShardSet& shards, Split split, int64_t length, uint64_t seed, bool shuffle);
  int64_t windows() const;
  // Fills sequence number `index` (0, 1, 2, ... over the whole run): inputs [T], targets [T].
  void sequence(int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets) const;

 private:
  const ShardSet& shards_;
  Split split_;
  int64_t length_;
  uint64_t seed_;
  bool shuffle_;
};

}  // namespace twell
