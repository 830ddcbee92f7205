// SPDX-License-Identifier: Apache-2.0
// Tokenized text on disk, to be read: a folder with manifest.json (shard_manifest.h) and
// memory-mapped shards of token ids. shard_writer.h makes it.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "twell/base/file.h"
#include "twell/data/shard_manifest.h"
#include "twell/data/training_data.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

// The memory-mapped shards of a folder. A split's token stream is cut into windows of length + 1
// tokens that start length tokens apart: the last target of a window is the first input of the
// next, so every token but the stream's first is a target exactly once; an incomplete last window
// is dropped.
class ShardSet : public TrainingData {
 public:
  // Checks the manifest, the sizes of the files, and that the tokenizer is the one that made them.
  // InputError says what does not match and what to do.
  ShardSet(const std::filesystem::path& folder, const Tokenizer& tokenizer);
  ShardSet(const std::filesystem::path& folder, const std::string& tokenizer_hash,
           int64_t vocab_size);

  const ShardCounts& counts() const { return manifest_.counts; }
  int64_t tokens(Split split) const override { return manifest_.tokens(split); }
  int64_t sequences(Split split, int64_t length) const override {
    return (tokens(split) - 1) / length;
  }
  void read_sequence(Split split, int64_t index, std::span<int32_t> inputs,
                     std::span<int32_t> targets) const override;
  // A document ends with its end token, and with its sequence.
  void add_documents(Split split, int64_t index, std::span<const int32_t> inputs,
                     std::vector<int64_t>& lengths) const override;
  int64_t targets(Split, int64_t, int64_t length) const override { return length; }
  std::string identity() const override;
  // The token that ends every document; -1 when the set was opened without a tokenizer.
  int32_t end_token() const { return end_token_; }
  // Copies ids [begin, begin + out.size()) of the split's token stream. InputError when an id is
  // outside the vocabulary, which means that the file was altered.
  void read(Split split, int64_t begin, std::span<int32_t> out) const;
  // Reads every file and compares its checksum; InputError names a file that was altered.
  void verify() const;

 private:
  struct Stream {
    std::vector<MappedFile> files;
    std::vector<int64_t> begins;  // each file's first position in the token stream
  };
  const Stream& stream(Split split) const { return streams_[static_cast<size_t>(split)]; }
  void map(Split split, const std::filesystem::path& folder);

  ShardManifest manifest_;
  int32_t end_token_ = -1;
  std::array<Stream, kSplits> streams_;
};

}  // namespace twell
