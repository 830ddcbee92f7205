// SPDX-License-Identifier: Apache-2.0
// Keys and values of past tokens on the GPU, per layer: [blocks * kKvBlock, H_kv * hd], rotated
// keys, in bf16 or in 8 bits with an f32 scale per token and head, by the rule of kv_cache.h. A
// sequence's tokens lie in the blocks of its slot's table (format/kv_blocks.h). Block 0 is no
// sequence's: in bf16 its values are zero, because cuDNN reads it behind the ends of sequences.
// What else lies behind an end may be NaN, left by another sequence: whoever lets cuDNN read it
// clears it first (ops/attention/kv_bytes_cuda.h), and nothing else reads it. The host keeps tables
// and lengths; kernels read the tables from device memory, so that captured graphs stay valid when
// tables change.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <span>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/format/kv_blocks.h"
#include "twell/model/kv_cache.h"

namespace twell {

class KvCacheCuda : public KvTables {
 public:
  // For `slots` sequences of at most `capacity` tokens each. blocks: memory for so many, which the
  // caller assigns with set_table(); 0: every slot has all the blocks that its capacity needs.
  // InputError when they do not fit the model's context or the device.
  KvCacheCuda(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t blocks = 0,
              bool eight_bits = false);
  static int64_t bytes(const ModelConfig& config, int64_t slots, int64_t capacity,
                       bool eight_bits = false);
  static int64_t token_bytes(const ModelConfig& config, bool eight_bits = false);
  static int64_t block_bytes(const ModelConfig& config, bool eight_bits = false) {
    return kKvBlock * token_bytes(config, eight_bits);
  }

  bool eight_bits() const { return eight_bits_; }
  // Rows of a layer in bf16; null in 8 bits.
  __nv_bfloat16* keys(int64_t layer) const { return wide(keys_, layer); }
  __nv_bfloat16* values(int64_t layer) const { return wide(values_, layer); }
  // Rows of a layer in 8 bits; null in bf16.
  KvBytes key_bytes(int64_t layer) const { return bytes_of(keys_, layer); }
  KvBytes value_bytes(int64_t layer) const { return bytes_of(values_, layer); }
  // Row of a layer for a token of the slot's sequence; its block must be in the table.
  int64_t row(int64_t slot, int64_t position) const;
  // Blocks are counted from 0 here and in table().
  void set_table(int64_t slot, std::span<const int32_t> blocks);
  int64_t blocks() const { return blocks_ + 1; }  // with block 0

  // Enqueues copies of what set_table() has changed; call it before kernels that read the tables.
  void enqueue_tables(cudaStream_t stream);
  const int32_t* tables() const { return tables_on_device_.data(); }  // on the device
  // Where a slot's table begins there.
  int64_t table_begin(int64_t slot) const { return slot * table_size_; }
  int64_t layer_size() const { return layer_size_; }  // keys, or values, of a layer

 private:
  // The keys, or the values, of all layers.
  struct Rows {
    DeviceBuffer<__nv_bfloat16> wide;  // [L, rows, H_kv * hd], or nothing
    DeviceBuffer<int8_t> bytes;        // [L, rows, H_kv * hd], or nothing
    DeviceBuffer<float> scales;        // [L, blocks, H_kv, kKvBlock], with the bytes
  };
  __nv_bfloat16* wide(const Rows& rows, int64_t layer) const {
    return eight_bits_ ? nullptr : rows.wide.data() + layer * layer_size_;
  }
  KvBytes bytes_of(const Rows& rows, int64_t layer) const {
    if (!eight_bits_) return {};
    return {rows.bytes.data() + layer * layer_size_,
            rows.scales.data() + layer * (layer_size_ / head_dim_)};
  }

  bool eight_bits_;
  int64_t table_size_, width_, head_dim_, layer_size_;
  std::vector<int64_t> copied_;  // entries of each slot's table that are on the device
  Rows keys_, values_;
  DeviceBuffer<int32_t> tables_on_device_;  // [slots, table_size]
};

}  // namespace twell
