// SPDX-License-Identifier: Apache-2.0
// Work lists of the two GEMMs of the tile-union execution, and what finding and building unions
// share.
#pragma once

#include <climits>
#include <cstdint>

#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/barrier.cuh"

namespace twell::tile_union {

// Exclusive prefix sum over the CTA; `total` receives the sum. scratch: one int per warp.
template <int Threads>
__device__ int block_scan(int value, int* scratch, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int through = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = through;
  __syncthreads();
  int sum = lane < Threads / 32 ? scratch[lane] : 0;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(~0u, sum, 31);
  const int before = __shfl_sync(~0u, sum, max(warp - 1, 0));
  return through - value + (warp > 0 ? before : 0);
}

__device__ __forceinline__ int blocks_of(int neurons) { return (neurons + kBlock - 1) / kBlock; }

// Blocks per work item of up that give the shortest run time. An item's cost is what its k-steps
// read: 128 rows of x, and 64 of w_up per block. Few items run in rounds over the CTAs; with many,
// the last and smallest items fill the gaps.
template <int Threads>
__device__ int best_chunk(const int32_t* sizes, int count, int ctas, int* scratch) {
  int best = kMaxChunkBlocks, best_cost = INT_MAX;
  for (int chunk = kMaxChunkBlocks; chunk >= kMaxChunkBlocks - 1; --chunk) {
    int items = 0;
    for (int tile = threadIdx.x; tile < count; tile += Threads) {
      items += (blocks_of(sizes[tile]) + chunk - 1) / chunk;
    }
    int total;
    block_scan<Threads>(items, scratch, total);
    const int half_rounds =
        total < 3 * ctas ? (total + ctas - 1) / ctas * 2 : (2 * total + ctas) / ctas;
    const int cost = half_rounds * (kTileTokens / kBlock + chunk);
    if (cost < best_cost) {
      best = chunk;
      best_cost = cost;
    }
  }
  return best;
}

// Counting sort of the tiles by number of blocks, largest first, so that the last wave of a
// persistent GEMM consists of small items. Called by one CTA, like all functions below. sizes:
// union sizes, in any memory. buckets: [blocks + 1] in shared memory, by falling size. scratch: one
// int per warp. Ends with a barrier.
template <int Threads>
__device__ void order_tiles(const Tiles& tiles, const int32_t* sizes, int count, uint32_t* buckets,
                            int* scratch) {
  for (int i = threadIdx.x; i <= tiles.blocks; i += Threads) buckets[i] = 0;
  __syncthreads();
  for (int tile = threadIdx.x; tile < count; tile += Threads) {
    atomicAdd(&buckets[tiles.blocks - blocks_of(sizes[tile])], 1u);
  }
  __syncthreads();
  int base = 0;
  for (int first = 0; first <= tiles.blocks; first += Threads) {
    const int i = first + threadIdx.x;
    const int value = i <= tiles.blocks ? static_cast<int>(buckets[i]) : 0;
    int total;
    const int before = block_scan<Threads>(value, scratch, total);
    if (i <= tiles.blocks) buckets[i] = base + before;
    base += total;
  }
  __syncthreads();
  // The order within a bucket is arbitrary: it decides which CTA computes a tile, not its result.
  for (int tile = threadIdx.x; tile < count; tile += Threads) {
    tiles.order[atomicAdd(&buckets[tiles.blocks - blocks_of(sizes[tile])], 1u)] = tile;
  }
  __syncthreads();
}

template <int Threads>
__device__ void count_unions(const int32_t* sizes, int count, ActivityCuda* activity) {
  if (activity == nullptr) return;
  unsigned long long sum = 0;
  for (int tile = threadIdx.x; tile < count; tile += Threads) sum += sizes[tile];
  if (sum > 0) atomicAdd(&activity->union_neurons, sum);
  if (threadIdx.x == 0) atomicAdd(&activity->unions, static_cast<unsigned long long>(count));
}

// A chunk of a tile's blocks in the format of up's work items.
__device__ __forceinline__ int2 up_item(int tile, int blocks, int chunk, int chunks) {
  const int begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
  return int2{tile, begin | (end - begin) << 16};
}

// Number of work items of up for a union, with as few cuts as possible.
__device__ __forceinline__ int chunks_of(int neurons) {
  return (blocks_of(neurons) + kMaxChunkBlocks - 1) / kMaxChunkBlocks;
}

// Value of a tile's word in `marked` once its work items are added.
inline constexpr int kHasItems = -1;

// Writes every step-th item of a tile, from `chunk` on, to the list at `at` and beyond. A CTA that
// sees one item sees all outputs of its tile.
__device__ __forceinline__ void add_items(const Tiles& tiles, int tile, int neurons, int at,
                                          int chunk, int step) {
  const int chunks = chunks_of(neurons);
  __threadfence();
  for (; chunk < chunks; chunk += step) {
    sm90::store_relaxed(tiles.up_items + at + chunk,
                        up_item(tile, blocks_of(neurons), chunk, chunks));
  }
}

// One CTA adds the items of all tiles that have none yet, in order of size.
template <int Threads>
__device__ void add_other_items(const Tiles& tiles, const int32_t* sizes, int count, int* scratch) {
  int items = __ldcg(&tiles.counts->up_items);
  for (int base = 0; base < count; base += Threads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const int tile = i < count ? tiles.order[i] : -1;
    const bool missing = tile >= 0 && __ldcg(tiles.marked + tile) != kHasItems;
    int total;
    const int at =
        items + block_scan<Threads>(missing ? chunks_of(sizes[tile]) : 0, scratch, total);
    if (missing) add_items(tiles, tile, sizes[tile], at, 0, 1);
    items += total;
  }
}

// Orders the tiles and cuts each into nearly equal chunks.
template <int Threads>
__device__ void make_schedule(const Tiles& tiles, const int32_t* sizes, int ctas, uint32_t* buckets,
                              ActivityCuda* activity) {
  __shared__ int scratch[Threads / 32];
  const int count = tiles.counts->tiles;
  order_tiles<Threads>(tiles, sizes, count, buckets, scratch);
  const int chunk_blocks = best_chunk<Threads>(sizes, count, ctas, scratch);
  int items = 0;
  for (int first = 0; first < count; first += Threads) {
    const int i = first + threadIdx.x;
    const int tile = i < count ? tiles.order[i] : 0;
    const int blocks = i < count ? blocks_of(sizes[tile]) : 0;
    const int chunks = (blocks + chunk_blocks - 1) / chunk_blocks;
    int total;
    const int at = items + block_scan<Threads>(chunks, scratch, total);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      tiles.up_items[at + chunk] = up_item(tile, blocks, chunk, chunks);
    }
    items += total;
  }
  count_unions<Threads>(sizes, count, activity);
  if (threadIdx.x == 0) tiles.counts->up_items = items;
}

// --- Shared by finding and building unions.

// Bit j is set if value j of eight bf16 values is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(const uint4& values) {
  const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    bits |= ((parts[j] & 0x7fff) != 0) << (2 * j) | ((parts[j] & 0x7fff0000) != 0) << (2 * j + 1);
  }
  return bits;
}

// The column tiles of one part of a tile.
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

// The first warp writes exclusive prefix sums of the mask's set bits; before[words] is the total.
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

// Publishes a tile's size. Returns true, to all threads, in the CTA that publishes the last one.
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

// Bytes that scan_mask reads and writes.
inline int scan_bytes(const Gate& gate) { return (gate.col_tiles * 8 * 2 + 1) * 4; }

}  // namespace twell::tile_union
