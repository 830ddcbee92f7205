// SPDX-License-Identifier: Apache-2.0
// Keys and values of past tokens, per layer: [blocks * block_tokens, H_kv * hd], rotated keys. A
// sequence's tokens lie in the blocks of its slot's table, block_tokens in each.
//
// In f32, or in 8 bits with an f32 scale per token and head, the head's largest magnitude over 127:
// an element is then off by at most 1/254 of that magnitude. A head that is not finite becomes NaN.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/buffer.h"
#include "twell/model/config.h"
#include "twell/ops/attention/attention.h"

namespace twell {

struct KvFormat {
  // See is_attention_block(). 64 is what attention takes at a time: smaller blocks share shorter
  // beginnings, but cost attention 5% (32) to 15% (16).
  int64_t block_tokens = 64;
  bool eight_bits = false;
};

// The tables and lengths of a cache's slots, on the host.
class KvTables {
 public:
  int64_t length(int64_t slot) const;  // tokens held
  void set_length(int64_t slot, int64_t length);
  int64_t capacity() const { return capacity_; }
  int64_t slots() const { return std::ssize(lengths_); }
  std::span<const int32_t> table(int64_t slot) const;
  void set_table(int64_t slot, std::span<const int32_t> blocks);

 protected:
  // See the caches' constructors. InputError when a sequence does not fit the model's context.
  KvTables(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t block_tokens,
           int64_t blocks);
  void check_slot(int64_t slot) const;

  int64_t capacity_, blocks_;
  std::vector<int64_t> lengths_;
  std::vector<std::vector<int32_t>> tables_;
};

class KvCache : public KvTables {
 public:
  // For `slots` sequences of at most `capacity` tokens each. blocks: memory for this number of
  // blocks, which the caller assigns with set_table(); 0: every slot has all the blocks that its
  // capacity needs.
  KvCache(const ModelConfig& config, int64_t slots, int64_t capacity, const KvFormat& format = {},
          int64_t blocks = 0);
  static int64_t bytes(const ModelConfig& config, int64_t slots, int64_t capacity,
                       const KvFormat& format = {});
  static int64_t block_bytes(const ModelConfig& config, const KvFormat& format = {});

  // Writes a token's keys and values [H_kv * hd] of a layer; its block must be in the table.
  void store(int64_t layer, int64_t slot, int64_t position, const float* keys, const float* values);
  // Makes the sequence attend to the slot's first `tokens` keys and values of a layer.
  void show(int64_t layer, int64_t slot, int64_t tokens, AttentionSequence& sequence) const;
  int64_t block_tokens() const { return format_.block_tokens; }

 private:
  // The rows of all layers.
  struct Rows {
    Buffer<float> floats;  // [L, rows, H_kv * hd], or nothing
    Buffer<int8_t> bytes;  // [L, rows, H_kv * hd], or nothing
    Buffer<float> scales;  // [L, rows, H_kv], with the bytes
  };
  int64_t rows() const { return blocks_ * format_.block_tokens; }
  void write(const Rows& to, int64_t row, const float* from) const;

  KvFormat format_;
  int64_t width_, head_dim_;
  Rows keys_, values_;
};

}  // namespace twell
