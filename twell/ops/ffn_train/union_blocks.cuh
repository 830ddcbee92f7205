// SPDX-License-Identifier: Apache-2.0
// What kernels that work on the blocks of all token tiles of a chunk share.
#pragma once

#include <cstdint>

#include "twell/ops/ffn_train/hybrid_train.h"

namespace twell::ffn_train {

using tile_union::kBlock;
using tile_union::kTileTokens;

// Which tile a block belongs to. In shared memory.
struct BlockIndex {
  int tiles, blocks;
  int first[kMaxChunkTiles];

  // By all threads of the CTA; ends with a barrier.
  __device__ void load(const Tiles& all) {
    const int count = all.counts->tiles;
    for (int i = threadIdx.x; i < count; i += blockDim.x) first[i] = all.first_block[i];
    if (threadIdx.x == 0) {
      tiles = count;
      blocks = all.first_block[count - 1] + (all.union_size[count - 1] + kBlock - 1) / kBlock;
    }
    __syncthreads();
  }
  // The last tile that begins at or before the block: those without blocks come before it.
  __device__ int tile_of(int block) const {
    int low = 0, high = tiles;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// A row of a block: eight pieces of eight values, piece q at [q ^ row % 8].
__device__ __forceinline__ uint4* image_row(__nv_bfloat16* image, int block, int row) {
  return reinterpret_cast<uint4*>(image) + (int64_t{block} * kTileTokens + row) * (kBlock / 8);
}

// Bits of the lower lanes.
__device__ __forceinline__ uint32_t lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// The active (token, neuron) pairs of a block, by a CTA with a thread per token. In shared memory.
struct BlockPattern {
  alignas(16) uint32_t words[kBlock][kTileTokens / 32];  // by neuron: a bit per token
  int before[kBlock];                                    // active pairs of the neurons before
  int half;

  // From every thread's bits, one per neuron. Barriers: none.
  __device__ void vote(uint64_t fired) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t of_lane[2] = {};
#pragma unroll
    for (int column = 0; column < kBlock; ++column) {
      const uint32_t votes = __ballot_sync(~0u, (fired >> column & 1) != 0);
      if (column % 32 == lane) of_lane[column / 32] = votes;
    }
    words[lane][warp] = of_lane[0];
    words[lane + 32][warp] = of_lane[1];
  }
  __device__ int count(int column) const {
    return __popc(words[column][0]) + __popc(words[column][1]) + __popc(words[column][2]) +
           __popc(words[column][3]);
  }
  // Fills `before` from `words`; returns the number of pairs. Begins and ends with a barrier.
  __device__ int scan() {
    __syncthreads();
    const int column = threadIdx.x, lane = threadIdx.x % 32;
    int through = 0, own = 0;
    if (column < kBlock) {
      own = through = count(column);
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, through, step);
        if (lane >= step) through += other;
      }
      if (column == 31) half = through;
    }
    __syncthreads();
    if (column < kBlock) before[column] = through - own + (column >= 32 ? half : 0);
    __syncthreads();
    return before[kBlock - 1] + count(kBlock - 1);
  }
  // This thread's bits.
  __device__ uint64_t fired() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t bits[2] = {};
#pragma unroll
    for (int column = 0; column < kBlock; ++column) {
      bits[column / 32] |= (words[column][warp] >> lane & 1) << (column % 32);
    }
    return bits[0] | uint64_t{bits[1]} << 32;
  }
  // Place of this thread's pair among those of the block.
  __device__ int place(int column) const {
    const int warp = threadIdx.x / 32;
    int below = before[column] + __popc(words[column][warp] & lanes_below());
    for (int w = 0; w < warp; ++w) below += __popc(words[column][w]);
    return below;
  }
};

}  // namespace twell::ffn_train
