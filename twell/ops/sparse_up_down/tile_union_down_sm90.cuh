// SPDX-License-Identifier: Apache-2.0
// Down projection of the tile-union execution: y[tile tokens] = activations[tile] w_down[union].
// Persistent. An item is 128 tokens by 256 columns of y; its k-steps are the blocks of 64 neurons
// of the tile's union, none at all for a tile without non-zeros.
//   warpgroup 0     bulk-copies blocks of activations and gathers rows of w_down
//   warpgroups 1,2  64 tokens each: WGMMA, then y through shared memory into whole rows
#pragma once

#include "twell/ops/sparse_up_down/gather_ring_sm90.cuh"
#include "twell/ops/sparse_up_down/tile_union.h"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::tile_union::down {

inline constexpr int kStages = 4;
inline constexpr uint32_t kBytesA = kTileTokens * kBlock * 2;
inline constexpr uint32_t kColumnBlockBytes = kBlock * 128;  // 64 neurons by 64 columns
inline constexpr uint32_t kBytesW = kColumns / 64 * kColumnBlockBytes;
inline constexpr uint32_t kStageBytes = kBytesA + kBytesW;
// y leaves in two halves of 128 columns: 64 rows of 256 bytes per warpgroup.
inline constexpr uint32_t kOutBytes = 64 * 256;
inline constexpr uint32_t kSharedBytes = kStages * kStageBytes + kConsumerWarpgroups * kOutBytes +
                                         2 * kStages * 8 + ItemFeed::kBytes +
                                         1024;  // alignment to the swizzle atom

struct Shared {
  uint32_t ring, out, feed, full, empty;
  __device__ explicit Shared(void* base) {
    ring = (sm90::smem_address(base) + 1023) & ~1023u;
    out = ring + kStages * kStageBytes;
    feed = out + kConsumerWarpgroups * kOutBytes;
    full = feed + ItemFeed::kBytes;
    empty = full + kStages * 8;
  }
};

struct Item {
  int tile, column, size;
  // {tile, first column, neurons in the tile's union, -}
  __device__ static int4 load(const Gemm& gemm, int index) {
    const int column_blocks = (gemm.width + kColumns - 1) / kColumns;
    if (index >= gemm.tiles.counts->tiles * column_blocks) return int4{-1, 0, 0, 0};
    const int tile = gemm.tiles.order[index / column_blocks];
    return int4{tile, index % column_blocks * kColumns, gemm.tiles.union_size[tile], 0};
  }
  __device__ explicit Item(int4 item) : tile(item.x), column(item.y), size(item.z) {}
  __device__ int k_steps() const { return (size + kBlock - 1) / kBlock; }
};

__device__ __forceinline__ void produce(const Gemm& gemm, const Shared& shared) {
  using namespace sm90;
  GatherRing<kStages> ring{shared.full, shared.empty};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = gemm.width / 8;
  // Warp w gathers neurons 16 w .. 16 w + 15 of a block; lane l piece l of a row's 512 bytes.
  const uint32_t dst_lane = kBytesA + lane / 8 * kColumnBlockBytes + warp * 16 * 128;
  ItemFeed feed{shared.feed};
  ItemFeeder feeder(feed, &gemm.tiles.counts->down_taken,
                    [&](int index) { return Item::load(gemm, index); });
  for (;;) {
    feeder.publish();
    const Item item(feed.take());
    if (item.tile < 0) break;
    const int32_t* ids = gemm.tiles.union_ids + int64_t{item.tile} * gemm.tiles.blocks * kBlock;
    const auto* weight = reinterpret_cast<const uint4*>(gemm.weight) + item.column / 8 + lane;
    const bool inside = item.column + lane * 8 < gemm.width;
    const auto* blocks = reinterpret_cast<const uint8_t*>(gemm.tiles.activations) +
                         int64_t{item.tile} * gemm.tiles.blocks * kBytesA;
    const auto load_id = [&](int k) {
      const int position = k * kBlock + warp * 16 + lane % 16;
      return position < item.size ? ids[position] : -1;
    };
    const int k_steps = item.k_steps();
    int next_id = load_id(0);
    for (int k = 0; k < k_steps; ++k) {
      const int id = next_id;
      next_id = load_id(k + 1);
      const int index_of_stage = ring.acquire();
      const uint32_t stage = shared.ring + index_of_stage * kStageBytes;
      if (threadIdx.x == 0) {
        const uint32_t landed = shared.full + index_of_stage * 8;
        barrier_expect(landed, kBytesA);
        bulk_load(stage, blocks + int64_t{k} * kBytesA, kBytesA, landed);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int neuron = __shfl_sync(~0u, id, i);
        const bool valid = inside && neuron >= 0;
        gather16(stage + dst_lane + i * 128 + ((lane % 8) ^ (i % 8)) * 16,
                 weight + (valid ? int64_t{neuron} * pieces : 0), valid);
      }
      ring.commit();
    }
  }
}

// Row of its warpgroup's 64 that this lane writes in store i: a warp writes two rows at a time.
__device__ __forceinline__ int stored_row(int i) {
  return threadIdx.x % 128 / 32 * 16 + i * 2 + threadIdx.x % 32 / 16;
}

// Columns [128 half, 128 half + 128) of this warpgroup's rows, by way of shared memory, so that
// rows are written in whole 256-byte pieces.
__device__ __forceinline__ void store_half(const Gemm& gemm, const Item& item, uint32_t out,
                                           const float (&acc)[128], const int32_t (&tokens)[8],
                                           int half) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int row = warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int a = 4 * (half * 16 + i);
    const uint32_t at = out + row * 256 + (i ^ (row % 8)) * 16 + lane % 4 * 4;
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(acc[a + 1]), "f"(acc[a]));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(acc[a + 3]), "f"(acc[a + 2]));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * 256), "r"(pair) : "memory");
  }
  __syncwarp();  // a warp stores the 16 rows that it wrote
  const int column = item.column + half * 128 + lane % 16 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int from = stored_row(i);
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(out + from * 256 + ((lane % 16) ^ (from % 8)) * 16));
    if (tokens[i] >= 0 && column < gemm.width) {
      *reinterpret_cast<uint4*>(gemm.y + int64_t{tokens[i]} * gemm.width + column) = values;
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void consume(const Gemm& gemm, const Shared& shared) {
  using namespace sm90;
  const int warpgroup = threadIdx.x / 128 - 1;
  ItemFeed feed{shared.feed};
  StageReader<kStages> ring{shared.full, shared.empty};
  float acc[128];
  for (;;) {
    const Item item(feed.take());
    if (item.tile < 0) break;
    // The rows of y that this lane writes, fetched while the GEMM runs.
    int32_t tokens[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      tokens[i] = gemm.tiles.tokens[item.tile * kTileTokens + warpgroup * 64 + stored_row(i)];
    }
    const int k_steps = item.k_steps();
    if (k_steps == 0) {
#pragma unroll
      for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
    }
    int previous = 0;
    for (int k = 0; k < k_steps; ++k) {
      const int current = ring.wait();
      const uint32_t stage = shared.ring + current * kStageBytes;
      const uint64_t a = k_major_operand(stage + warpgroup * (kBytesA / 2));
      const uint64_t b = n_major_operand(stage + kBytesA, kColumnBlockBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        wgmma<kColumns, true>(acc, a + i * 2, b + i * (2048 / 16), k > 0 || i > 0);
      }
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        ring.release(previous);
      }
      previous = current;
      ring.advance();
    }
    wgmma_wait<0>();
    if (k_steps > 0) ring.release(previous);
    const uint32_t out = shared.out + warpgroup * kOutBytes;
    store_half(gemm, item, out, acc, tokens, 0);
    store_half(gemm, item, out, acc, tokens, 1);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    tile_union_down_sm90_kernel(const __grid_constant__ Gemm gemm) {
  extern __shared__ uint8_t memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    init_ring(shared.full, shared.empty, kStages);
    ItemFeed{shared.feed}.init();
    sm90::fence_barrier_init();
  }
  __syncthreads();
  sm90::wait_for_previous_kernel();
  if (threadIdx.x < kProducers) {
    sm90::registers_decrease<kProducerRegisters>();
    produce(gemm, shared);
  } else {
    sm90::registers_increase<kConsumerRegisters>();
    consume(gemm, shared);
  }
}

}  // namespace twell::tile_union::down
