// SPDX-License-Identifier: Apache-2.0
// manifest.json of a shard set: its contents, tokenizer and options.
//
//   {"format": "twell-shards", "version": 1,
//    "tokenizer_hash": "...", "vocab_size": 4096, "dtype": "u16",
//    "seed": 0, "validation_fraction": 0.01,
//    "documents": 3, "text_bytes": 5000, "validation_text_bytes": 60,
//    "train":      {"tokens": 1300, "shards": [{"file": "...", "tokens": 1300, "crc64": "..."}]},
//    "validation": {"tokens": 20,   "shards": [...]}}
//
// dtype: "u16" for vocabularies of at most 65,536 tokens, else "u32". A shard file holds only its
// ids, little-endian; crc64 is the CRC-64/XZ of its bytes, 16 hex digits.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace twell {

enum class Split { kTrain, kValidation };
inline constexpr int kSplits = 2;
std::string_view split_name(Split split);  // "train", "validation"

struct ShardCounts {
  int64_t documents = 0, train_tokens = 0, validation_tokens = 0, text_bytes = 0,
          validation_text_bytes = 0;
};

struct ShardFile {
  std::string name;  // file name in the manifest's folder
  int64_t tokens = 0;
  uint64_t crc64 = 0;
};

struct ShardManifest {
  std::string tokenizer_hash;
  int64_t vocab_size = 0;
  uint64_t seed = 0;
  double validation_fraction = 0;
  ShardCounts counts;
  std::array<std::vector<ShardFile>, kSplits> shards;  // indexed by Split

  int64_t id_bytes() const { return vocab_size <= 65536 ? 2 : 4; }
  int64_t tokens(Split split) const {
    return split == Split::kTrain ? counts.train_tokens : counts.validation_tokens;
  }
};

std::string to_json(const ShardManifest& manifest);

// InputError, starting with `source` and naming the field, for anything to_json never writes: a
// missing or mistyped field, a count out of range, counts that do not add up, a repeated file name,
// or one that is not plain (letters, digits, '.', '_' and '-', not starting with a dot).
ShardManifest parse_shard_manifest(std::string_view json, const std::string& source);

}  // namespace twell
