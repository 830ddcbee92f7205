// SPDX-License-Identifier: Apache-2.0
// Kernels of the hybrid execution of the feed-forward layer in training on the GPU, and the data
// they hand to each other, beside those of the tile-union execution (tile_union.h). Per chunk of
// tokens:
//   forward   gate GEMM, split_rows, build_unions; up: u on the unions; keep; down
//   backward  up with d_y and w_down: d_h on the unions; expand; down with two products: d_x;
//             then by neuron: rank, neuron_unions, transpose, weight_grads
// "Image": bf16 values of 128 rows by 64 columns per block, as WGMMA reads them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/tile_union.h"
#include "twell/ops/ffn_train/ffn_train_counts_cuda.h"

namespace twell::ffn_train {

using tile_union::Tiles;

// Tokens that run at a time: the images' memory, whose size has to do for any pattern, is in
// proportion. Below, weight gradients would be read and written too often.
inline constexpr int kChunkTokens = 16384;
inline constexpr int kMaxChunkTiles =
    kChunkTokens / tile_union::kTileTokens +
    (kChunkTokens / tile_union::kHeavyFactor + tile_union::kTileTokens - 1) /
        tile_union::kTileTokens;
inline constexpr int kNeuronTile = 128;

// Of one chunk. All 0 before forward.
struct KeptState {
  unsigned long long used;  // values, those that did not fit included
  ActivityCuda activity;
  uint32_t ticket;
  int32_t overflow;  // not everything fit: backward makes g and u anew
  int32_t up_taken, down_taken;
};

// What forward keeps of the activations of a chunk, beside its tiles without their images.
struct Kept {
  uint32_t* values;   // [capacity] g | u << 16 of active pairs: a block's neurons one after the
                      // other, tokens ascending
  uint4* masks;       // [block_capacity, kBlock] a bit per token of the tile: the neuron is active
  uint32_t* offsets;  // [block_capacity] of a block's first value
  KeptState* state;
  int64_t capacity;
  int block_capacity;
};

// h into the place of g, what backward needs into `kept`, and what is counted.
struct Keep {
  Tiles tiles;             // activations: image of g in, of h out
  const __nv_bfloat16* u;  // image, or null: no gate
  Kept kept;
  double* l1_parts;            // [blocks]
  FfnTrainCountsCuda* counts;  // added to, or null
  uint8_t* active;             // [F], or null
};
cudaError_t launch_keep(const Keep& keep, int ctas, cudaStream_t stream);

// From d_h and what was kept: d_g, d_u and h as images on the unions, exactly 0 where a neuron is
// not active.
struct Expand {
  Tiles tiles;         // activations: h out; where the chunk overflowed, g in
  __nv_bfloat16* d_u;  // image out, null without a gate; where the chunk overflowed, u in
  __nv_bfloat16* d_g;  // image: d_h in
  Kept kept;
  uint4* masks;           // [blocks, kBlock] out where the chunk overflowed
  int32_t* neuron_nnz;    // [F] added to
  const float* l1_scale;  // one
};
cudaError_t launch_expand(const Expand& expand, int ctas, cudaStream_t stream);

// Weight gradients are products over tokens: the same once more with neurons in the role of tokens.
// Neurons that fire about equally often share a tile.
struct NeuronCounts {
  int32_t tiles;
  int32_t blocks;      // of all tiles
  int32_t items;       // of weight_grads
  int32_t arrived;     // CTAs of neuron_unions
  int32_t transposed;  // blocks that transpose has handed out
  int32_t taken, up_taken, again_taken, down_taken;
};
struct NeuronTiles {
  // 0 at the start:
  int32_t* nnz;    // [F] tokens that a neuron is active on
  int32_t* size;   // [tiles] tokens that any neuron of the tile is active on
  int32_t* turns;  // [tiles, products * columns, 2] pieces added so far
  NeuronCounts* counts;
  //
  int32_t* order;            // [tiles, kNeuronTile] neuron, or -1
  uint32_t* mask;            // [tiles, words] a bit per slot of the token tiles
  int32_t* positions;        // [tiles, words / 4, kNeuronTile] where a neuron is in the union of a
                             // token tile, counted from the first block of all; or -1
  int32_t* first_block;      // [tiles]
  int32_t* ids;              // [blocks, kBlock] token, or -1
  __nv_bfloat16* images[3];  // by product: [blocks, kNeuronTile, kBlock]
  int4* entries;             // {first block, blocks, tile, 2 * piece + (there are more)}
  int ffn;                   // F
  int max_tiles;             // F / kNeuronTile rounded up
  int words;                 // 4 per token tile
  int products;              // 3, or 2 without a gate
  int columns;               // D / 256 rounded up
};
cudaError_t launch_rank_neurons(const NeuronTiles& neurons, cudaStream_t stream);

struct Transpose {
  Tiles tiles;
  Kept kept;
  const uint4* masks;              // those of expand
  const __nv_bfloat16* images[3];  // by product, images on the token tiles
  NeuronTiles neurons;
};
// Which tokens a tile of neurons needs, and the items of weight_grads; ctas: those it will have.
cudaError_t launch_neuron_unions(const Transpose& transpose, int ctas, cudaStream_t stream);
cudaError_t launch_transpose(const Transpose& transpose, int ctas, cudaStream_t stream);

// grads[p] [F, D] += images[p] right[p]; pieces of a sum are added in their order.
struct WeightGrads {
  NeuronTiles neurons;
  const __nv_bfloat16* right[3];  // [M, D]
  float* grads[3];                // [F, D]
  int width;                      // D
  bool add;                       // false: = in place of +=, for neurons that fire
};
// 0 to the gradients of neurons that do not fire.
cudaError_t launch_clear_idle(const WeightGrads& grads, cudaStream_t stream);
cudaError_t launch_weight_grads_sm90(const WeightGrads& grads, int ctas, cudaStream_t stream);

}  // namespace twell::ffn_train
