// SPDX-License-Identifier: Apache-2.0
// Where the keys and values of a sequence lie in a paged cache on the GPU: rows of H_kv * hd
// values, kKvBlock consecutive tokens of a sequence in each block of rows. A sequence's table names
// its blocks in the order of its tokens. Values are in bf16, or in 8 bits with a scale per row and
// head (KvBytes).
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

// Rows in 8 bits: element c of head h in row j is data[j * H_kv * hd + h * hd + c] times
// scales[kv_scale(j, h, H_kv)]. Scales of a head's successive keys lie side by side.
struct KvBytes {
  int8_t* data = nullptr;   // [rows, H_kv * hd]
  float* scales = nullptr;  // [blocks, H_kv, kKvBlock]
};

TWELL_HOST_DEVICE inline int64_t kv_scale(int64_t row, int64_t head, int64_t kv_heads) {
  const auto at = static_cast<uint32_t>(row);  // a cache has fewer than 2^31 rows
  return (at / kKvBlock * kv_heads + head) * kKvBlock + at % kKvBlock;
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
