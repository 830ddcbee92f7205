// SPDX-License-Identifier: Apache-2.0
// The kernels of hybrid training (hybrid.cu) but for its products: chunks of tokens, images, what
// forward keeps for backward, and the kernels' problems and launches. ctas: one per SM.
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
inline constexpr int kChunkTokens = 16384;
inline constexpr int kMaxChunkTiles =
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

// --- hybrid_keep.cu ---
// keep: h = f(g) * u in place of g; keeps g and u of active pairs; counts.
struct Keep {
  Tiles tiles;             // activations: image of g in, of h out
  const __nv_bfloat16* u;  // image, or null: no gate
  Kept kept;
  double* l1_parts;            // [blocks]
  FfnTrainCountsCuda* counts;  // added to, or null
  uint8_t* active;             // [F], or null
  bool squared;                // relu2: f(g) = g^2
  bool up_relu;                // dReLU
};
cudaError_t launch_keep(const Keep& keep, int ctas, cudaStream_t stream);

// expand: from d_h and what was kept, d_g, d_u and h as images on the unions, exactly 0 where a
// neuron is not active. Where the chunk overflowed, g and u come from images instead.
struct Expand {
  Tiles tiles;         // activations: image of h out; of g in, where the chunk overflowed
  __nv_bfloat16* d_u;  // image out, null without a gate; of u in, where the chunk overflowed
  __nv_bfloat16* d_g;  // image out; of d_h in
  Kept kept;
  uint4* masks;           // [blocks, kBlock] written where the chunk overflowed
  int32_t* neuron_nnz;    // [F] added to
  const float* l1_scale;  // one value
  bool squared;           // relu2
  bool up_relu;           // dReLU
};
cudaError_t launch_expand(const Expand& expand, int ctas, cudaStream_t stream);

// --- hybrid_neurons.cu ---
// rank: sorts neurons by how many tokens they are active on, and counts their tiles.
cudaError_t launch_rank_neurons(const NeuronTiles& neurons, cudaStream_t stream);

// neuron_unions: which tokens each tile of neurons gathers, and the items of weight_grads.
// transpose: from images on tiles of tokens to images on tiles of neurons.
struct Transpose {
  Tiles tiles;
  Kept kept;
  const uint4* masks;              // those of expand
  const __nv_bfloat16* images[3];  // by product, images on the token tiles
  NeuronTiles neurons;
};
cudaError_t launch_neuron_unions(const Transpose& transpose, int ctas, cudaStream_t stream);
cudaError_t launch_transpose(const Transpose& transpose, int ctas, cudaStream_t stream);

}  // namespace twell::ffn_train
