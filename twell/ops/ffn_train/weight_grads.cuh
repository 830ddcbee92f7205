// SPDX-License-Identifier: Apache-2.0
// The weight gradients of hybrid training (hybrid.cu): tiles of neurons and the work items of a
// gathered GEMM over their tokens, as the kernels for Hopper (weight_grads_sm90.cu) and the
// portable ones (weight_grads_sm80.cu) compute them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/ops/ffn/tile_union/gathered_items.cuh"

namespace twell::ffn_train {

inline constexpr int kNeuronTile = 128;  // neurons

// Weight gradients are sums over tokens, so here 128 neurons make a tile, which gathers the tokens
// that any of them is active on. Neurons that fire about equally often share a tile.
struct NeuronCounts {
  int32_t tiles;
  int32_t blocks;      // of all tiles
  int32_t items;       // of weight_grads
  int32_t arrived;     // CTAs of neuron_unions that have finished
  int32_t transposed;  // blocks that CTAs of transpose have taken
  // Queue counters of weight_grads, of the product d_y w_down^T, of u when it is computed again,
  // and of d_x.
  int32_t taken, up_taken, again_taken, down_taken;
};
struct NeuronTiles {
  // Must be 0 before backward:
  int32_t* nnz;    // [F] tokens that a neuron is active on
  int32_t* size;   // [tiles] tokens that any neuron of the tile is active on
  int32_t* turns;  // [tiles, products * columns, 2] pieces added so far
  NeuronCounts* counts;
  // Written by backward:
  int32_t* order;        // [tiles, kNeuronTile] neuron, or -1
  uint32_t* mask;        // [tiles, words] a bit per slot of the token tiles
  int32_t* positions;    // [tiles, words / 4, kNeuronTile] a neuron's position in the union of a
                         // token tile, counted from the first block of all; or -1
  int32_t* first_block;  // [tiles]
  int32_t* ids;          // [blocks, kBlock] token, or -1
  __nv_bfloat16* images[3];  // by product: [blocks, kNeuronTile, kBlock]
  int4* entries;             // {first block, blocks, tile, 2 * piece + (1: more pieces follow)}
  int ffn;                   // F
  int max_tiles;             // F / kNeuronTile rounded up
  int words;                 // 4 per token tile
  int products;              // 3, or 2 without a gate
  int columns;               // D / 256 rounded up
};

// grads[p] [neurons of a tile] += images[p][tile]
// right[p][tokens of the tile]. An item is a piece of one such sum, for 128 neurons by 256 columns.
// The pieces of a sum are added to the gradients in their order, so that results repeat: the CTA
// with a later piece waits until the piece before it is added. This ends however few CTAs run at a
// time. A CTA takes items only while it runs, and works on them in ascending order. So the lowest
// item that is not done is the next one of a running CTA, and waits for none. Where gradients are
// overwritten, the first piece of a sum is stored and the others are added.
struct WeightGrads {
  NeuronTiles neurons;
  const __nv_bfloat16* right[3];  // [M, D]
  float* grads[3];                // [F, D]
  int width;                      // D
  bool add;                       // false: = instead of +=, for neurons that fire
};

// {tile, product * columns + column block, first block, blocks | (2 * piece + more) << 16}
struct WeightGradItems {
  NeuronTiles neurons;
  const __nv_bfloat16* right[3];
  float* grads[3];
  int32_t* taken;
  int width;
  bool add;

  WeightGradItems() = default;
  explicit WeightGradItems(const WeightGrads& of)
      : neurons(of.neurons),
        right{of.right[0], of.right[1], of.right[2]},
        grads{of.grads[0], of.grads[1], of.grads[2]},
        taken(&of.neurons.counts->taken),
        width(of.width),
        add(of.add) {}

  __device__ __forceinline__ int items() const { return neurons.counts->items; }
  __device__ __forceinline__ int4 first(int index) const {
    const int sums = neurons.products * neurons.columns;
    const int4 entry = neurons.entries[index / sums];
    return int4{entry.z, index % sums, entry.x, entry.y | entry.w << 16};
  }
  __device__ __forceinline__ int4 second(const int4& item) const { return item; }
  __device__ __forceinline__ tile_union::gathered::Operands operands(const int4& item) const {
    const int product = item.y / neurons.columns, column = item.y % neurons.columns;
    const auto* image = reinterpret_cast<const uint8_t*>(neurons.images[product]) +
                        int64_t{item.z} * tile_union::gathered::kBytesA;
    const auto* from = reinterpret_cast<const uint4*>(right[product]);
    const int blocks = item.w & 0xffff;
    return {{image, image},
            {from, from},
            neurons.ids + int64_t{item.z} * tile_union::kBlock,
            blocks * tile_union::kBlock,
            blocks,
            1,
            column * tile_union::kColumns};
  }
  // Where the pieces of the item's sum take turns, for rows of each half of a tile of neurons.
  __device__ __forceinline__ int32_t* turn(const int4& item, int half) const {
    return neurons.turns + (int64_t{item.x} * neurons.products * neurons.columns + item.y) * 2 +
           half;
  }
  __device__ __forceinline__ static int piece(const int4& item) { return item.w >> 17; }
  __device__ __forceinline__ static bool more(const int4& item) { return (item.w >> 16 & 1) != 0; }
};

cudaError_t launch_weight_grads_sm90(const WeightGrads& grads, int ctas, cudaStream_t stream);
cudaError_t launch_weight_grads_sm80(const WeightGrads& grads, int ctas, cudaStream_t stream);

}  // namespace twell::ffn_train
