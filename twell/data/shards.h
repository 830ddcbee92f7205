// SPDX-License-Identifier: Apache-2.0
// Tokenized text on disk: a folder with manifest.json (shard_manifest.h) and memory-mapped shards
// of token ids (little-endian u16 when the vocabulary allows, else u32). EOS ends every document.
//
// Train and validation: each document goes whole to one split, chosen by a hash of its text (its
// first piece, when it comes in several) and the seed. So the split does not depend on the order of
// the documents, and copies of a document are on the same side. Documents are assigned with
// probability validation_fraction, but the target is that share of the tokens. If validation gets
// fewer than half or more than twice its target (few documents, or one giant), the tail of the
// train stream moves to the end of the validation stream, or the reverse, until the share is exact.
// The target is at least 4,097 tokens (two windows of 2,048) or a tenth of all, whichever is less.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "twell/base/file.h"
#include "twell/data/shard_manifest.h"
#include "twell/data/text_source.h"
#include "twell/tokenizer/tokenizer.h"

namespace twell {

struct TokenizeOptions {
  double validation_fraction = 0.01;  // in [0, 1); 0: no validation split
  int64_t shard_tokens = int64_t{1} << 26;
  uint64_t seed = 0;
  int threads = 0;
  std::function<void(int64_t bytes_read, int64_t total_bytes, int64_t tokens)> progress;
};

// What write_shards needs from a tokenizer.
struct TokenEncoder {
  // Appends the ids of a text; called from several threads at once.
  std::function<void(std::string_view text, std::vector<int32_t>& ids)> encode;
  std::function<int64_t(int32_t id)> token_bytes;  // bytes of text that a token represents
  int32_t eos = -1;
  int64_t vocab_size = 0;
  std::string hash;

  // Special tokens spelled out in the text stay plain text, so a document cannot contain EOS.
  static TokenEncoder of(const Tokenizer& tokenizer);  // must outlive the result
};

// Reads the whole source once, from its start, and writes the shard set atomically: after a
// failure the folder is unchanged. The result depends only on the text, the tokenizer, the seed and
// the fraction. A separate thread reads ahead and calls source's log, but never while `progress`
// runs. InputError: faults of the source; no tokens for one of the splits; a tokenizer without EOS;
// a full disk.
ShardCounts write_shards(TextSource& source, const Tokenizer& tokenizer,
                         const std::filesystem::path& folder, const TokenizeOptions& options);
ShardCounts write_shards(TextSource& source, const TokenEncoder& encoder,
                         const std::filesystem::path& folder, const TokenizeOptions& options);

// The memory-mapped shards of a folder. Immutable; several threads may read at once.
class ShardSet {
 public:
  // Checks the manifest, the sizes of the files, and that the tokenizer is the one that made them.
  // InputError says what does not match and what to do.
  ShardSet(const std::filesystem::path& folder, const Tokenizer& tokenizer);
  ShardSet(const std::filesystem::path& folder, const std::string& tokenizer_hash,
           int64_t vocab_size);

  const ShardCounts& counts() const { return manifest_.counts; }
  int64_t tokens(Split split) const { return manifest_.tokens(split); }
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
  std::array<Stream, kSplits> streams_;
};

}  // namespace twell
