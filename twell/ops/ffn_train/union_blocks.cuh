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

constexpr int kBlockThreads = 256;                      // of a CTA that works on a block
constexpr int kBlockPieces = kTileTokens * kBlock / 8;  // of 16 bytes
constexpr int kPieces = kBlockPieces / kBlockThreads;   // of a thread
constexpr int kWordsPerNeuron = kTileTokens / 32;
static_assert(kBlock * kWordsPerNeuron == kBlockThreads);

__device__ __forceinline__ uint4* block_pieces(__nv_bfloat16* image, int block) {
  return reinterpret_cast<uint4*>(image) + int64_t{block} * kBlockPieces;
}
// The eight neurons that piece i of an image holds of token i / 8.
__device__ __forceinline__ int piece_columns(int i) { return (i % 8) ^ (i / 8 % 8); }
// Where an image has the value of a token and a neuron, in values.
__device__ __forceinline__ int value_index(int row, int column) {
  return row * kBlock + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// Blocks of a tile of neurons.
__device__ __forceinline__ int tile_blocks(const NeuronTiles& neurons, int tile) {
  return (neurons.size[tile] + kBlock - 1) / kBlock;
}

// Bits of the lower lanes.
__device__ __forceinline__ uint32_t lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// The values of a block on their way between its image and what is kept: shared memory, images.
struct BlockValues {
  uint4 g[kBlockPieces];
  uint4 u[kBlockPieces];
  uint8_t fired[kTileTokens][8];  // a bit per neuron
  int scratch[kBlockThreads / 32];

  __device__ void put_fired(int piece, uint32_t bits) {
    fired[piece / 8][piece_columns(piece)] = static_cast<uint8_t>(bits);
  }
  // Which of 32 tokens fire a neuron: thread t has tokens t % 4 * 32 .. of neuron t / 4.
  __device__ uint32_t tokens_of_thread() const {
    const int column = threadIdx.x / kWordsPerNeuron, first = threadIdx.x % kWordsPerNeuron * 32;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      bits |= static_cast<uint32_t>(fired[first + i][column / 8] >> (column % 8) & 1) << i;
    }
    return bits;
  }
  __device__ int index_of(int bit) const {
    return value_index(threadIdx.x % kWordsPerNeuron * 32 + bit, threadIdx.x / kWordsPerNeuron);
  }
};

}  // namespace twell::ffn_train
