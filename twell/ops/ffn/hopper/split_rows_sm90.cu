// SPDX-License-Identifier: Apache-2.0
// Which tokens form a tile. One cluster, whose CTAs own consecutive runs of rows and tell each
// other their sums.
#include <cooperative_groups.h>

#include <climits>
#include <cstdint>

#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::tile_union {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kCluster = 8;

// Sums over the rows of one CTA, [kCluster] of them in each CTA's shared memory.
struct RowSums {
  unsigned long long nnz;
  int max_nnz;
  int heavy;
};

__device__ int warp_sum(int value) { return __reduce_add_sync(~0u, value); }

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads)
    split_rows_kernel(Gate gate, Tiles tiles, ActivityCuda* activity) {
  __shared__ RowSums all[kCluster];
  __shared__ RowSums mine;
  __shared__ int warp_heavy[kWarps];
  sm90::wait_for_previous_kernel();
  sm90::allow_next_kernel();
  const auto cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = gate.rows;
  const int plain_tiles = (rows + kTileTokens - 1) / kTileTokens;
  // Each warp owns a run of rows, so that the heavy list is in row order.
  const int share = (rows + kCluster * kThreads - 1) / (kCluster * kThreads) * 32;
  const int begin = min((rank * kWarps + warp) * share, rows);
  const int end = min(begin + share, rows);
  if (threadIdx.x == 0) mine = {};
  __syncthreads();
  long long sum = 0;
  int most = 0;
#pragma unroll 4
  for (int row = begin + lane; row < end; row += 32) {
    sum += gate.row_nnz[row];
    most = max(most, gate.row_nnz[row]);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) {
    atomicAdd(&mine.nnz, static_cast<unsigned long long>(sum));
    atomicMax(&mine.max_nnz, most);
  }
  __syncthreads();
  cluster.sync();
  if (threadIdx.x < kCluster) *cluster.map_shared_rank(&all[rank], threadIdx.x) = mine;
  cluster.sync();
  long long total = 0;
  int max_nnz = 0;
  for (int i = 0; i < kCluster; ++i) {
    total += static_cast<long long>(all[i].nnz);
    max_nnz = max(max_nnz, all[i].max_nnz);
  }
  // Heavy: above both. With one tile there is nothing to keep apart.
  const long long mean_bound = plain_tiles > 1 ? kHeavyFactor * total / rows : INT_MAX;
  const int bound = static_cast<int>(
      min(max(mean_bound, static_cast<long long>(kHeavyFloor)), static_cast<long long>(INT_MAX)));
  int heavy = 0;
  if (max_nnz > bound) {
#pragma unroll 4
    for (int row = begin + lane; row < end; row += 32) heavy += gate.row_nnz[row] > bound;
  }
  heavy = warp_sum(heavy);
  if (lane == 0) warp_heavy[warp] = heavy;
  __syncthreads();
  const int warps_before = warp_sum(lane < warp ? warp_heavy[lane] : 0);
  if (warp == kWarps - 1 && lane == 0) mine.heavy = warps_before + heavy;
  __syncthreads();
  if (threadIdx.x < kCluster) {
    cluster.map_shared_rank(&all[rank], threadIdx.x)->heavy = mine.heavy;
  }
  cluster.sync();
  int slot = warps_before, heavy_total = 0;
  for (int i = 0; i < kCluster; ++i) {
    if (i < rank) slot += all[i].heavy;
    heavy_total += all[i].heavy;
  }

  int32_t* heavy_tokens = tiles.tokens + plain_tiles * kTileTokens;
#pragma unroll 2
  for (int base = begin; base < end; base += 32) {
    const int row = base + lane;
    const bool apart = row < end && gate.row_nnz[row] > bound;
    const uint32_t vote = __ballot_sync(~0u, apart);
    if (row < end) tiles.tokens[row] = apart ? -1 : row;
    if (apart) heavy_tokens[slot + __popc(vote & ((1u << lane) - 1))] = row;
    slot += __popc(vote);
  }
  if (rank != 0) return;
  const int heavy_tiles = (heavy_total + kTileTokens - 1) / kTileTokens;
  for (int i = rows + threadIdx.x; i < plain_tiles * kTileTokens; i += kThreads) {
    tiles.tokens[i] = -1;
  }
  for (int i = heavy_total + threadIdx.x; i < heavy_tiles * kTileTokens; i += kThreads) {
    heavy_tokens[i] = -1;
  }
  for (int i = threadIdx.x; i < plain_tiles + heavy_tiles; i += kThreads) {
    tiles.union_size[i] = 0;
  }
  if (threadIdx.x != 0) return;
  *tiles.counts = Counts{.tiles = plain_tiles + heavy_tiles, .plain_tiles = plain_tiles};
  if (activity != nullptr) {
    atomicAdd(&activity->tokens, static_cast<unsigned long long>(rows));
    atomicAdd(&activity->nnz, static_cast<unsigned long long>(total));
    atomicMax(&activity->max_row_nnz, static_cast<unsigned long long>(max_nnz));
  }
}

}  // namespace

cudaError_t launch_split_rows(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                              cudaStream_t stream) {
  return sm90::launch_dependent(split_rows_kernel, dim3(kCluster), kThreads, 0, stream, gate, tiles,
                                activity);
}

}  // namespace twell::tile_union
