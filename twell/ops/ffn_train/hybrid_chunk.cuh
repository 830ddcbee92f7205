// SPDX-License-Identifier: Apache-2.0
// What the kernels of hybrid training (hybrid.cu) share: chunks of tokens, images, and what
// forward keeps for backward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twell/base/rounding.h"
#include "twell/format/activity_cuda.h"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"
#include "twell/ops/ffn_train/ffn_train_parts.cuh"
#include "twell/ops/ffn_train/weight_grads.cuh"

namespace twell::ffn_train {
namespace {

using gpu::block_scan;
using tile_union::kBlock;
using tile_union::kTileTokens;
using tile_union::Tiles;

// Index in an image's block of the value of a row and a column.
__device__ __forceinline__ int value_index(int row, int column) {
  return row * kBlock + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// Tokens per chunk. The memory of the images is proportional to it, because it must be enough for
// any pattern. Smaller chunks would read and write the weight gradients more often.
constexpr int kChunkTokens = 16384;
constexpr int kMaxChunkTiles =
    kChunkTokens / kTileTokens +
    (kChunkTokens / tile_union::kHeavyFactor + kTileTokens - 1) / kTileTokens;

// State of one chunk. All 0 before forward.
struct KeptState {
  unsigned long long used;  // values, including those that did not fit
  ActivityCuda activity;
  uint32_t ticket;               // CTAs of keep that have finished
  int32_t overflow;              // 1: something did not fit, and backward computes g and u again
  int32_t up_taken, down_taken;  // queue counters of the GEMMs up and down
};

// What forward keeps of a chunk's activations for backward. Its tiles are kept too, but not their
// images.
struct Kept {
  uint32_t* values;   // [capacity] g | u << 16 of active pairs, by block, neuron, token
  uint4* masks;       // [block_capacity, kBlock] per neuron, a bit for each token it is active on
  uint32_t* offsets;  // [block_capacity] index of a block's first value
  KeptState* state;
  int64_t capacity;
  int block_capacity;
};

}  // namespace
}  // namespace twell::ffn_train
