// SPDX-License-Identifier: Apache-2.0
// Which rows find_unions sets apart. A tile's CTA judges its 128 rows by their own mean, so that it
// need not wait for others; once all are judged, heavy rows form tiles of their own, in row order.
#pragma once

#include <climits>
#include <cstdint>

#include "twell/ops/ffn/hopper/schedule_sm90.cuh"
#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/barrier.cuh"

namespace twell::tile_union {

struct HeavyRows {
  int sums[kTileTokens / 32];
  int32_t tokens[kTileTokens];  // of a heavy tile, or -1
  int scan[32];

  // By a CTA whose groups of kTileTokens threads each hold the non-zeros of the tile's rows. True
  // where this thread's row is heavy. Starts with a barrier.
  __device__ __forceinline__ bool judge(const Gate& gate, int tile, int nnz,
                                        ActivityCuda* activity) {
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (warp < kTileTokens / 32) {
      const int sum = __reduce_add_sync(~0u, nnz), most = __reduce_max_sync(~0u, nnz);
      if (threadIdx.x % 32 == 0) {
        sums[warp] = sum;
        if (activity != nullptr) {
          atomicAdd(&activity->nnz, static_cast<unsigned long long>(sum));
          atomicMax(&activity->max_row_nnz, static_cast<unsigned long long>(most));
        }
      }
    }
    __syncthreads();
    const int rows = min(gate.rows - tile * kTileTokens, kTileTokens);
    if (activity != nullptr && threadIdx.x == 0) {
      atomicAdd(&activity->tokens, static_cast<unsigned long long>(rows));
    }
    if (gate.rows <= kTileTokens) return false;  // with one tile there is nothing to keep apart
    int total = 0;
    for (const int sum : sums) total += sum;
    return nnz > max(kHeavyFactor * total / rows, kHeavyFloor);
  }

  // By a CTA of Threads, once all plain tiles are judged: the rows of heavy tile `index`, into
  // tokens. Returns how many rows are heavy in all. Starts and ends with a barrier.
  template <int Threads>
  __device__ int gather(const Tiles& tiles, int plain_tiles, int index) {
    const int begin = index * kTileTokens;
    int all = 0;
    __syncthreads();
    if (threadIdx.x < kTileTokens) tokens[threadIdx.x] = -1;
    for (int first = 0; first < plain_tiles; first += Threads) {
      const int tile = first + static_cast<int>(threadIdx.x);
      const uint4 mask = tile < plain_tiles ? tiles.heavy[tile] : uint4{};
      const uint32_t words[4] = {mask.x, mask.y, mask.z, mask.w};
      int rows = 0, total;
      for (const uint32_t word : words) rows += __popc(word);
      int rank = all + block_scan<Threads>(rows, scan, total) - begin;
      all += total;
      if (rows == 0 || rank >= kTileTokens || rank + rows <= 0) continue;
      for (int i = 0; i < 4; ++i) {
        for (uint32_t left = words[i]; left != 0; left &= left - 1, ++rank) {
          if (rank < 0 || rank >= kTileTokens) continue;
          tokens[rank] = tile * kTileTokens + i * 32 + __ffs(left) - 1;
        }
      }
    }
    __syncthreads();
    return all;
  }
};

}  // namespace twell::tile_union
