// SPDX-License-Identifier: Apache-2.0
// Keys and values of past tokens, per layer: [blocks * block_tokens, H_kv * hd] f32, rotated keys.
// A sequence's tokens lie in the blocks of its slot's table, block_tokens in each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/base/matrix.h"
#include "twell/model/config.h"

namespace twell {

// Tokens per block. 64 is what attention takes at a time: smaller blocks share shorter beginnings,
// but cost attention 5% (32) to 15% (16).
inline constexpr int64_t kKvBlockTokens = 64;

class KvCache {
 public:
  // For `slots` sequences of at most `capacity` tokens each. block_tokens: see AttentionSequence.
  // blocks: memory for so many, which the caller assigns with set_table(); 0: every slot has all
  // the blocks that its capacity needs.
  KvCache(const ModelConfig& config, int64_t slots, int64_t capacity,
          int64_t block_tokens = kKvBlockTokens, int64_t blocks = 0);
  static int64_t bytes(const ModelConfig& config, int64_t slots, int64_t capacity,
                       int64_t block_tokens = kKvBlockTokens);
  static int64_t block_bytes(const ModelConfig& config, int64_t block_tokens = kKvBlockTokens);

  MatrixF keys(int64_t layer) const;    // [blocks * block_tokens, H_kv * hd]
  MatrixF values(int64_t layer) const;  // [blocks * block_tokens, H_kv * hd]
  std::span<const int32_t> table(int64_t slot) const;
  void set_table(int64_t slot, std::span<const int32_t> blocks);
  // The row of keys() and values() that holds a token; its block must be in the table.
  int64_t row(int64_t slot, int64_t position) const {
    const int32_t block =
        tables_[static_cast<size_t>(slot)][static_cast<size_t>(position / block_tokens_)];
    return block * block_tokens_ + position % block_tokens_;
  }
  int64_t length(int64_t slot) const;  // tokens held
  void set_length(int64_t slot, int64_t length);
  int64_t capacity() const { return capacity_; }
  int64_t slots() const { return std::ssize(lengths_); }
  int64_t block_tokens() const { return block_tokens_; }

 private:
  void check_slot(int64_t slot) const;

  int64_t capacity_, width_, block_tokens_, blocks_;
  Buffer<float> keys_, values_;
  std::vector<int64_t> lengths_;
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace twell
