// SPDX-License-Identifier: Apache-2.0
// Which tokens form a tile, and the work lists of the two GEMMs.
#include <climits>
#include <cstdint>

#include "twell/ops/sparse_up_down/tile_union.h"

namespace twell::tile_union {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Exclusive prefix sum over the CTA; `total` receives the sum. scratch: kWarps ints.
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
  int sum = scratch[lane];
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(~0u, sum, 31);
  const int before = __shfl_sync(~0u, sum, max(warp - 1, 0));
  return through - value + (warp > 0 ? before : 0);
}

// One CTA. Each warp owns a contiguous run of rows, so that the heavy list is in row order.
__global__ void __launch_bounds__(kThreads) split_rows_kernel(Gate gate, Tiles tiles) {
  __shared__ int scratch[kWarps];
  const int rows = gate.rows;
  const int plain_tiles = (rows + kTileTokens - 1) / kTileTokens;
  const int lane = threadIdx.x % 32;
  const int share = (rows + kThreads - 1) / kThreads * 32;
  const int begin = min(static_cast<int>(threadIdx.x) / 32 * share, rows);
  const int end = min(begin + share, rows);
  int64_t sum = 0;
#pragma unroll 8
  for (int row = begin + lane; row < end; row += 32) sum += gate.row_nnz[row];
  // Two scans of halves, for the sum over all rows can pass 2^31.
  int low_total, high_total;
  block_scan(static_cast<int>(sum & 0xfffff), scratch, low_total);
  block_scan(static_cast<int>(sum >> 20), scratch, high_total);
  const int64_t total = (int64_t{high_total} << 20) + low_total;
  // Heavy: above both. With one tile there is nothing to keep apart.
  const int64_t mean_bound = plain_tiles > 1 ? kHeavyFactor * total / rows : INT_MAX;
  const int bound = static_cast<int>(min(max(mean_bound, int64_t{kHeavyFloor}), int64_t{INT_MAX}));
  int heavy = 0;
#pragma unroll 8
  for (int row = begin + lane; row < end; row += 32) heavy += gate.row_nnz[row] > bound;
  int heavy_total;
  int slot = block_scan(heavy, scratch, heavy_total);
  slot = __shfl_sync(~0u, slot, 0);  // the warp's first
  int32_t* heavy_tokens = tiles.tokens + plain_tiles * kTileTokens;
#pragma unroll 4
  for (int base = begin; base < end; base += 32) {
    const int row = base + lane;
    const bool apart = row < end && gate.row_nnz[row] > bound;
    const uint32_t vote = __ballot_sync(~0u, apart);
    if (row < end) tiles.tokens[row] = apart ? -1 : row;
    if (apart) heavy_tokens[slot + __popc(vote & ((1u << lane) - 1))] = row;
    slot += __popc(vote);
  }
  const int heavy_tiles = (heavy_total + kTileTokens - 1) / kTileTokens;
  for (int i = rows + threadIdx.x; i < plain_tiles * kTileTokens; i += kThreads) {
    tiles.tokens[i] = -1;
  }
  for (int i = heavy_total + threadIdx.x; i < heavy_tiles * kTileTokens; i += kThreads) {
    heavy_tokens[i] = -1;
  }
  if (threadIdx.x == 0) tiles.counts->tiles = plain_tiles + heavy_tiles;
}

__device__ int tile_blocks(const Tiles& tiles, int tile) {
  return (tiles.union_size[tile] + kBlock - 1) / kBlock;
}

// Blocks per up item that finish first: rounds of items over the CTAs, each item costing what its
// k-steps read, 128 rows of x and 64 of w_up per block.
__device__ int best_chunk(const Tiles& tiles, int count, int ctas, int* scratch) {
  int best = kMaxChunkBlocks, best_cost = INT_MAX;
  for (int chunk = kMaxChunkBlocks; chunk >= kMaxChunkBlocks - 1; --chunk) {
    int items = 0;
    for (int tile = threadIdx.x; tile < count; tile += kThreads) {
      items += (tile_blocks(tiles, tile) + chunk - 1) / chunk;
    }
    int total;
    block_scan(items, scratch, total);
    const int cost = (total + ctas - 1) / ctas * (kTileTokens / kBlock + chunk);
    if (cost < best_cost) {
      best = chunk;
      best_cost = cost;
    }
  }
  return best;
}

// One CTA. Counting sort of the tiles by blocks, largest first, so that the last wave of the
// persistent GEMMs is made of small items; then each tile is cut into near-equal chunks.
__global__ void __launch_bounds__(kThreads) schedule_kernel(Tiles tiles, int ctas) {
  extern __shared__ uint32_t buckets[];  // [blocks + 1], by falling size
  __shared__ int scratch[kWarps];
  const int count = tiles.counts->tiles;
  for (int i = threadIdx.x; i <= tiles.blocks; i += kThreads) buckets[i] = 0;
  __syncthreads();
  for (int tile = threadIdx.x; tile < count; tile += kThreads) {
    atomicAdd(&buckets[tiles.blocks - tile_blocks(tiles, tile)], 1u);
  }
  __syncthreads();
  int base = 0;
  for (int first = 0; first <= tiles.blocks; first += kThreads) {
    const int i = first + threadIdx.x;
    const int value = i <= tiles.blocks ? static_cast<int>(buckets[i]) : 0;
    int total;
    const int before = block_scan(value, scratch, total);
    if (i <= tiles.blocks) buckets[i] = base + before;
    base += total;
  }
  __syncthreads();
  // The order within a bucket is arbitrary: it decides who computes a tile, not its result.
  for (int tile = threadIdx.x; tile < count; tile += kThreads) {
    tiles.order[atomicAdd(&buckets[tiles.blocks - tile_blocks(tiles, tile)], 1u)] = tile;
  }
  __syncthreads();
  const int chunk_blocks = best_chunk(tiles, count, ctas, scratch);
  int items = 0;
  for (int first = 0; first < count; first += kThreads) {
    const int i = first + threadIdx.x;
    const int tile = i < count ? tiles.order[i] : 0;
    const int blocks = i < count ? tile_blocks(tiles, tile) : 0;
    const int chunks = (blocks + chunk_blocks - 1) / chunk_blocks;
    int total;
    const int at = items + block_scan(chunks, scratch, total);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
      tiles.up_items[at + chunk] = int2{tile, begin | (end - begin) << 16};
    }
    items += total;
  }
  if (threadIdx.x == 0) {
    tiles.counts->up_items = items;
    tiles.counts->up_taken = 0;
    tiles.counts->down_taken = 0;
  }
}

}  // namespace

cudaError_t launch_split_rows(const Gate& gate, const Tiles& tiles, cudaStream_t stream) {
  split_rows_kernel<<<1, kThreads, 0, stream>>>(gate, tiles);
  return cudaGetLastError();
}

cudaError_t launch_schedule(const Tiles& tiles, int ctas, cudaStream_t stream) {
  schedule_kernel<<<1, kThreads, (tiles.blocks + 1) * 4, stream>>>(tiles, ctas);
  return cudaGetLastError();
}

}  // namespace twell::tile_union
