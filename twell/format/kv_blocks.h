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

// The cache's row of token `key` of a sequence, which is in this block. A cache has fewer than 2^31
// rows.
TWELL_HOST_DEVICE inline int32_t kv_row(int32_t block, int key) {
  return block * kKvBlock + static_cast<int32_t>(static_cast<uint32_t>(key) % kKvBlock);
}

#ifdef __CUDACC__
// Rows of up to 32 blocks of a sequence, as a warp looks them up: each lane holds a block, so that
// a row costs a shuffle in place of a load. All lanes call every function.
class KvRows {
 public:
  // Serves the keys first <= key < end, at least one. first is a multiple of kKvBlock, and its
  // block is table[0].
  __device__ __forceinline__ KvRows(const int32_t* table, int first, int end)
      : first_(first),
        block_(table[min(static_cast<int>(threadIdx.x) % 32, (end - first - 1) / kKvBlock)]) {}
  // The key may lie behind the end; its row is then of no use.
  __device__ __forceinline__ int row(int key) const {
    return kv_row(__shfl_sync(0xffffffffu, block_, (key - first_) / kKvBlock), key);
  }

 private:
  int first_;
  int32_t block_;
};
#endif

}  // namespace twell
