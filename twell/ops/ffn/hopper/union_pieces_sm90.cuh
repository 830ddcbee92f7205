// SPDX-License-Identifier: Apache-2.0
// Pieces of finding and of building unions.
#pragma once

#include <cstdint>

#include "twell/ops/ffn/hopper/schedule_sm90.cuh"
#include "twell/ops/ffn/tile_union.h"

namespace twell::tile_union {

// Bit j: value j of eight bf16 values is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(const uint4& values) {
  const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    bits |= ((parts[j] & 0x7fff) != 0) << (2 * j) | ((parts[j] & 0x7fff0000) != 0) << (2 * j + 1);
  }
  return bits;
}

// The column tiles of one part.
struct Columns {
  int first, count;
  __device__ Columns(int col_tiles, int part, int parts) {
    const int share = (col_tiles + parts - 1) / parts;
    first = min(part * share, col_tiles);
    count = min(share, col_tiles - first);
  }
  __device__ int first_word() const { return first * (256 / 32); }
  __device__ int words() const { return count * (256 / 32); }
};

// Exclusive prefix sums of the mask's bits by the first warp, before[words] being the total.
__device__ inline void scan_mask(const uint32_t* mask, int words, int* before) {
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int base = 0; base < words; base += 32) {
    const int i = base + lane;
    const int count = i < words ? __popc(mask[i]) : 0;
    int through = count;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (i < words) before[i] = sum + through - count;
    sum += __shfl_sync(~0u, through, 31);
  }
  if (lane == 0) before[words] = sum;
}

// Tells that the tile's size is known. True, to all threads, in the CTA that tells so last.
__device__ inline bool last_size(const Tiles& tiles, int tile, int size) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    tiles.union_size[tile] = size;
    __threadfence();
    last = atomicAdd(&tiles.counts->sized, 1) == tiles.counts->tiles - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Bytes of what scan_mask reads and writes.
inline int scan_bytes(const Gate& gate) { return (gate.col_tiles * 8 * 2 + 1) * 4; }

}  // namespace twell::tile_union
