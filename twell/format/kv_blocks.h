// SPDX-License-Identifier: Apache-2.0
// Where the keys and values of a sequence lie in a paged cache on the GPU: rows of H_kv * hd
// values, kKvBlock consecutive tokens of a sequence in each block of rows. A sequence's table names
// its blocks in the order of its tokens.
#pragma once

#include <cstdint>

#include "twell/base/host_device.h"

namespace twell {

// The tiles of keys that attention takes at a time, so that no tile lies in two blocks.
inline constexpr int kKvBlock = 64;

// The cache's row of token `key` of a sequence, which is in this block.
TWELL_HOST_DEVICE inline int64_t kv_row(int32_t block, int key) {
  return int64_t{block} * kKvBlock + static_cast<uint32_t>(key) % kKvBlock;
}

#ifdef __CUDACC__
// Rows of a sequence's keys, as a warp looks them up: its lanes hold 32 entries of the table, so
// that a row costs a shuffle in place of a load. All lanes call every function, with one `first`.
class KvRows {
 public:
  // table: null where key 0 is row `begin` and the others follow it. Keys end at `end`.
  __device__ __forceinline__ KvRows(const int32_t* table, int64_t begin, int end)
      : table_(table), begin_(begin), last_(max(end - 1, 0) / kKvBlock) {}
  // Holds the blocks of the keys from `first` on.
  __device__ __forceinline__ void hold(int first) {
    if (table_ == nullptr) return;
    held_ = first / kKvBlock;
    mine_ = __ldg(table_ + min(held_ + static_cast<int>(threadIdx.x) % 32, last_));
  }
  // Whether it holds the block of this key behind `first`.
  __device__ __forceinline__ bool holds(int key) const { return key / kKvBlock < held_ + 32; }
  __device__ __forceinline__ int64_t row(int key) const {
    if (table_ == nullptr) return begin_ + key;
    return kv_row(__shfl_sync(0xffffffffu, mine_, key / kKvBlock - held_), key);
  }

 private:
  const int32_t* table_;
  int64_t begin_;
  int last_, held_ = 0;
  int32_t mine_ = 0;
};
#endif

}  // namespace twell
