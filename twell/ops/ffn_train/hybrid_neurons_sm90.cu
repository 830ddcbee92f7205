// SPDX-License-Identifier: Apache-2.0
// Neuron tiles: which neurons make which tile, and which tokens each tile needs. Every order is
// fixed, so that sums repeat.
#include <cstdint>

#include "twell/ops/ffn/hopper/schedule_sm90.cuh"
#include "twell/ops/ffn_train/hybrid_train.h"
#include "twell/ops/ffn_train/union_blocks.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::ffn_train {
namespace {

using tile_union::block_scan;

// --- rank: neurons by falling class of counts, four classes per factor of two -------------------
constexpr int kClasses = 128;

// 0 is the largest; the last one are those that never fire.
__device__ __forceinline__ int class_of(int nnz) {
  if (nnz == 0) return kClasses - 1;
  const int exponent = 31 - __clz(nnz);
  const int quarter = (exponent >= 2 ? nnz >> (exponent - 2) : nnz << (2 - exponent)) & 3;
  return kClasses - 2 - (exponent * 4 + quarter);
}

constexpr int kRankThreads = 1024;

// One CTA; a counting sort that keeps neurons of a class in their order.
__global__ void __launch_bounds__(kRankThreads) rank_neurons_kernel(NeuronTiles neurons) {
  __shared__ int of_warp[kRankThreads / 32][kClasses];
  __shared__ int next[kClasses];  // place of the next neuron of a class
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < kClasses) next[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < neurons.ffn; i += kRankThreads) {
    atomicAdd(&next[class_of(neurons.nnz[i])], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int& place : next) {
      const int count = place;
      place = sum;
      sum += count;
    }
    neurons.counts->tiles = (next[kClasses - 1] + kNeuronTile - 1) / kNeuronTile;
  }
  __syncthreads();
  const int active = next[kClasses - 1];
  for (int first = 0; first < neurons.ffn; first += kRankThreads) {
    for (int i = threadIdx.x; i < kRankThreads / 32 * kClasses; i += kRankThreads) {
      of_warp[i / kClasses][i % kClasses] = 0;
    }
    __syncthreads();
    const int neuron = first + threadIdx.x;
    const int own = class_of(neuron < neurons.ffn ? neurons.nnz[neuron] : 0);
    const uint32_t peers = __match_any_sync(~0u, own);
    const int rank = __popc(peers & lanes_below());
    if (rank == 0) of_warp[warp][own] = __popc(peers);
    __syncthreads();
    if (threadIdx.x < kClasses) {
      int sum = next[threadIdx.x];
      for (auto& counts : of_warp) {
        const int count = counts[threadIdx.x];
        counts[threadIdx.x] = sum;
        sum += count;
      }
      next[threadIdx.x] = sum;
    }
    __syncthreads();
    if (own < kClasses - 1) neurons.order[of_warp[warp][own] + rank] = neuron;
    __syncthreads();
  }
  const int padded = (active + kNeuronTile - 1) / kNeuronTile * kNeuronTile;
  for (int i = active + threadIdx.x; i < padded; i += kRankThreads) neurons.order[i] = -1;
}

// --- neuron unions -------------------------------------------------------------------------------
constexpr int kUnionThreads = 512;
constexpr int kUnionParts = 4;

// A piece of a sum: long enough that adding it to the gradients weighs little, short enough that
// the work can be shared evenly.
constexpr int kMinPiece = 24, kMaxPiece = 128, kItemsPerCta = 4;

// Where a neuron is in the union of a token tile, counted from the first block of all; or -1.
__device__ __forceinline__ int find_position(const Tiles& tiles, int words, int tile, int neuron) {
  if (neuron < 0) return -1;
  const int64_t word = int64_t{tile} * words + neuron / 32;
  const uint32_t bits = tiles.mask[word];
  if ((bits >> (neuron % 32) & 1) == 0) return -1;
  return tiles.first_block[tile] * kBlock + static_cast<int>(tiles.before[word]) +
         __popc(bits & ((1u << (neuron % 32)) - 1));
}

// By one CTA: where each tile's blocks begin, and the items of weight_grads: first pieces of all
// sums first, so that whoever adds a later piece seldom waits.
__device__ void make_items(const NeuronTiles& neurons, int ctas) {
  __shared__ int scratch[kUnionThreads / 32];
  const int tiles = neurons.counts->tiles;
  const int sums = neurons.products * neurons.columns;
  int blocks = 0;
  for (int first = 0; first < tiles; first += kUnionThreads) {
    const int tile = first + threadIdx.x;
    int total;
    const int before =
        block_scan<kUnionThreads>(tile < tiles ? tile_blocks(neurons, tile) : 0, scratch, total);
    if (tile < tiles) neurons.first_block[tile] = blocks + before;
    blocks += total;
  }
  const int share = static_cast<int>((int64_t{blocks} * sums + ctas - 1) / ctas);
  const int piece = min(max(share / kItemsPerCta, kMinPiece), kMaxPiece);
  int entries = 0;
  for (int k = 0, found = 1; found > 0; ++k) {
    found = 0;
    for (int first = 0; first < tiles; first += kUnionThreads) {
      const int tile = first + threadIdx.x;
      const int in_tile = tile < tiles ? tile_blocks(neurons, tile) : 0;
      const int pieces = (in_tile + piece - 1) / piece;
      int total;
      const int before = block_scan<kUnionThreads>(pieces > k ? 1 : 0, scratch, total);
      if (pieces > k) {
        const int begin = in_tile * k / pieces, end = in_tile * (k + 1) / pieces;
        neurons.entries[entries + before] = int4{neurons.first_block[tile] + begin, end - begin,
                                                 tile, 2 * k + (k + 1 < pieces ? 1 : 0)};
      }
      entries += total;
      found += total;
    }
  }
  if (threadIdx.x == 0) {
    neurons.counts->blocks = blocks;
    neurons.counts->items = entries * sums;
  }
}

// kUnionParts CTAs share the token tiles of a neuron tile.
__global__ void __launch_bounds__(kUnionThreads)
    neuron_unions_kernel(Transpose transpose, int words, int ctas) {
  __shared__ bool last;
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  const auto& [tiles, kept, masks_made, images, neurons] = transpose;
  const int tile = blockIdx.y;
  const int lane = threadIdx.x % 32;
  if (tile < neurons.counts->tiles) {
    const uint4* masks = kept.state->overflow != 0 ? masks_made : kept.masks;
    int of_lane[kNeuronTile / 32];
    for (int i = 0; i < kNeuronTile / 32; ++i) {
      of_lane[i] = neurons.order[tile * kNeuronTile + i * 32 + lane];
    }
    int32_t* positions = neurons.positions + int64_t{tile} * neurons.words * (kNeuronTile / 4);
    constexpr int kWarps = kUnionThreads / 32;
    int tokens = 0;
    for (int from = blockIdx.x * kWarps + threadIdx.x / 32; from < tiles.counts->tiles;
         from += kUnionParts * kWarps) {
      uint4 fired{};
#pragma unroll
      for (int i = 0; i < kNeuronTile / 32; ++i) {
        const int position = find_position(tiles, words, from, of_lane[i]);
        positions[(int64_t{from} * kNeuronTile) + i * 32 + lane] = position;
        if (position < 0) continue;
        const uint4 bits = masks[position];
        fired.x |= bits.x;
        fired.y |= bits.y;
        fired.z |= bits.z;
        fired.w |= bits.w;
      }
      fired.x = __reduce_or_sync(~0u, fired.x);
      fired.y = __reduce_or_sync(~0u, fired.y);
      fired.z = __reduce_or_sync(~0u, fired.z);
      fired.w = __reduce_or_sync(~0u, fired.w);
      tokens += __popc(fired.x) + __popc(fired.y) + __popc(fired.z) + __popc(fired.w);
      if (lane == 0) {
        *reinterpret_cast<uint4*>(neurons.mask + int64_t{tile} * neurons.words + from * 4) = fired;
      }
    }
    if (lane == 0 && tokens > 0) atomicAdd(&neurons.size[tile], tokens);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&neurons.counts->arrived, 1) == static_cast<int>(gridDim.x * gridDim.y) - 1;
    __threadfence();
  }
  __syncthreads();
  if (last) make_items(neurons, ctas);
}

int mask_words(const NeuronTiles& neurons) { return (neurons.ffn + 255) / 256 * 8; }

}  // namespace

cudaError_t launch_rank_neurons(const NeuronTiles& neurons, cudaStream_t stream) {
  return sm90::launch_dependent(rank_neurons_kernel, dim3(1), kRankThreads, 0, stream, neurons);
}

cudaError_t launch_neuron_unions(const Transpose& transpose, int ctas, cudaStream_t stream) {
  const dim3 grid(kUnionParts, static_cast<unsigned>(transpose.neurons.max_tiles));
  return sm90::launch_dependent(neuron_unions_kernel, grid, kUnionThreads, 0, stream, transpose,
                                mask_words(transpose.neurons), ctas);
}

}  // namespace twell::ffn_train
