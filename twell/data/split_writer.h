// SPDX-License-Identifier: Apache-2.0
// Writes a stream of ids, cut into files of shard_tokens ids.
#pragma once

#include <lzma.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "twell/base/file.h"
#include "twell/data/shard_manifest.h"

namespace twell {

class SplitWriter {
 public:
  // Writes <folder>/<stem>-000.bin, -001.bin, ...
  SplitWriter(std::filesystem::path folder, std::string stem, int64_t vocab_size,
              int64_t shard_tokens);

  void append(std::span<const int32_t> ids);  // each in [0, vocab_size)
  int64_t tokens() const { return tokens_; }
  // Writes the buffered ids to disk; append() then starts a new file.
  void finish();
  const std::vector<ShardFile>& shards() const { return shards_; }

 private:
  struct OpenShard {
    explicit OpenShard(const std::filesystem::path& path) : file(path) {}
    AtomicFile file;
    int64_t tokens = 0;
    uint64_t crc64 = 0;
  };
  void write_buffer();

  std::filesystem::path folder_;
  std::string stem_;
  int64_t vocab_size_;
  int64_t id_bytes_;
  int64_t shard_tokens_;
  int64_t tokens_ = 0;
  std::vector<ShardFile> shards_;  // finished files
  std::unique_ptr<OpenShard> open_;
  std::vector<std::byte> buffer_;  // ids of the open shard, not yet written
};

// Converts a shard's ids, little-endian u16 or u32 (id_bytes 2 or 4), to int32. Returns the largest
// one as an unsigned number.
uint32_t unpack_ids(const std::byte* packed, int64_t id_bytes, std::span<int32_t> ids);

uint64_t crc64(std::span<const std::byte> bytes, uint64_t before = 0);

}  // namespace twell
