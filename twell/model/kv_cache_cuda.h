// SPDX-License-Identifier: Apache-2.0
// Keys and values of past tokens on the GPU, per layer: [blocks * kKvBlock, H_kv * hd] bf16,
// rotated keys. A sequence's tokens lie in the blocks of its slot's table (format/kv_blocks.h).
// Block 0 is no sequence's: its values are zero, and the others' are finite, because cuDNN also
// reads behind the ends of sequences. The host keeps tables and lengths; kernels read the tables
// from device memory, so that captured graphs stay valid when tables change.
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
  KvCacheCuda(const ModelConfig& config, int64_t slots, int64_t capacity, int64_t blocks = 0);
  static int64_t bytes(const ModelConfig& config, int64_t slots, int64_t capacity);
  static int64_t token_bytes(const ModelConfig& config);
  static int64_t block_bytes(const ModelConfig& config) { return kKvBlock * token_bytes(config); }

  __nv_bfloat16* keys(int64_t layer) const { return keys_.data() + layer * layer_size_; }
  __nv_bfloat16* values(int64_t layer) const { return values_.data() + layer * layer_size_; }
  // Row of keys() and values() for a token of the slot's sequence; its block must be in the table.
  int64_t row(int64_t slot, int64_t position) const;
  // Blocks are counted from 0 here and in table().
  void set_table(int64_t slot, std::span<const int32_t> blocks);
  // Enqueues that their values become zero again.
  void enqueue_clear(std::span<const int32_t> blocks, cudaStream_t stream) const;
  int64_t blocks() const { return blocks_ + 1; }  // with block 0

  // Enqueues copies of what set_table() has changed; call it before kernels that read the tables.
  void enqueue_tables(cudaStream_t stream);
  const int32_t* tables() const { return tables_on_device_.data(); }  // on the device
  // Where a slot's table begins there.
  int64_t table_begin(int64_t slot) const { return slot * table_size_; }

 private:
  int64_t table_size_, layers_, width_, layer_size_;
  std::vector<int64_t> copied_;  // entries of each slot's table that are on the device
  DeviceBuffer<__nv_bfloat16> keys_, values_;
  DeviceBuffer<int32_t> tables_on_device_;  // [slots, table_size]
};

}  // namespace twell
