// SPDX-License-Identifier: Apache-2.0
// Down projection of the tile-union execution: y[tile tokens] = activations[tile] w_down[union],
// and the sum of two such products for backward. An item is 128 tokens by 256 columns of y; its
// k-steps are the blocks of 64 neurons of the tile's union, none at all for a tile without
// non-zeros.
#pragma once

#include "twell/ops/ffn/hopper/gathered_gemm_sm90.cuh"
#include "twell/sm90/bf16_pair.cuh"

namespace twell::tile_union {

struct DownProblem {
  Tiles tiles;
  const __nv_bfloat16* activations[2];
  const __nv_bfloat16* weight[2];  // [F, D]; the second one null: one product
  __nv_bfloat16* y;                // [M, D]
  int32_t* taken;
  int width;  // D
  bool add;   // y += instead of =

  // Where tiles.ready is not null: find_unions may still be at work.
  __device__ __forceinline__ void wait_for_items() const {
    while (sm90::load_acquire(&tiles.counts->complete) == 0) __nanosleep(100);
  }
  // {tile, first column, neurons in the tile's union, its first block}
  __device__ __forceinline__ int4 load(int index) const {
    const int column_blocks = (width + kColumns - 1) / kColumns;
    if (index >= tiles.counts->tiles * column_blocks) return int4{-1, 0, 0, 0};
    const int tile = tiles.order[index / column_blocks];
    return int4{tile, index % column_blocks * kColumns, tiles.union_size[tile],
                tiles.first_block[tile]};
  }
  __device__ __forceinline__ gathered::Operands operands(const int4& item) const {
    const int64_t offset = int64_t{item.w} * gathered::kBytesA;
    const auto image = [&](int i) {
      return reinterpret_cast<const uint8_t*>(activations[i]) + offset;
    };
    return {{image(0), image(1)},
            {reinterpret_cast<const uint4*>(weight[0]), reinterpret_cast<const uint4*>(weight[1])},
            tiles.union_ids + int64_t{item.w} * kBlock,
            item.z,
            (item.z + kBlock - 1) / kBlock,
            weight[1] != nullptr ? 2 : 1,
            item.y,
            tiles.ready + item.x,
            2 * ((item.z + kBlock - 1) / kBlock)};
  }

  // y by way of shared memory, so that rows are written in whole 256-byte pieces.
  struct Store {
    const DownProblem& problem;
    const int column;
    const bool empty;   // no neuron of the tile fires
    int32_t tokens[8];  // the rows of y that this lane writes

    // Row of its warpgroup's 64 that this lane writes in store i: a warp writes two at a time.
    __device__ __forceinline__ static int stored_row(int i) {
      return threadIdx.x % 128 / 32 * 16 + i * 2 + threadIdx.x % 32 / 16;
    }
    __device__ __forceinline__ Store(const DownProblem& problem_in, const int4& item)
        : problem(problem_in), column(item.y), empty(item.z == 0) {
      const int warpgroup = threadIdx.x / 128 - 1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        tokens[i] = problem.tiles.tokens[item.x * kTileTokens + warpgroup * 64 + stored_row(i)];
      }
    }
    __device__ __forceinline__ void operator()(const float (&acc)[128], uint32_t out) const {
      if (problem.add && empty) return;
      store_half(acc, out, 0);
      store_half(acc, out, 1);
    }
    // Columns [128 half, 128 half + 128) of this warpgroup's rows.
    __device__ __forceinline__ void store_half(const float (&acc)[128], uint32_t out,
                                               int half) const {
      const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
      const int row = warp * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int a = 4 * (half * 16 + i);
        const uint32_t at = out + row * 256 + (i ^ (row % 8)) * 16 + lane % 4 * 4;
        const uint32_t upper = sm90::bf16x2(acc[a], acc[a + 1]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(upper) : "memory");
        const uint32_t lower = sm90::bf16x2(acc[a + 2], acc[a + 3]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * 256), "r"(lower) : "memory");
      }
      __syncwarp();  // a warp stores the 16 rows that it wrote
      const int first = column + half * 128 + lane % 16 * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int from = stored_row(i);
        uint4 values;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                     : "r"(out + from * 256 + ((lane % 16) ^ (from % 8)) * 16));
        if (tokens[i] >= 0 && first < problem.width) {
          __nv_bfloat16* to = problem.y + int64_t{tokens[i]} * problem.width + first;
          if (problem.add) {
            sm90::reduce_add16(to, values);
          } else {
            *reinterpret_cast<uint4*>(to) = values;
          }
        }
      }
      __syncwarp();
    }
  };
};

}  // namespace twell::tile_union
