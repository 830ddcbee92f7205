// SPDX-License-Identifier: Apache-2.0
// The gate GEMM for Hopper. Persistent; clusters of two CTAs, each CTA an output tile of 128 tokens
// by 256 neurons (the TwELL tile); the two CTAs of a cluster share their neurons and load half of
// the weight tile each, multicast to both.
//   warpgroup 0     one thread feeds a ring of kStages k-steps through the copy engine
//   warpgroups 1,2  64 tokens each: WGMMA, then pack
// Packing a tile is deferred, in steps, into the next tile's first k-steps: its activations wait as
// bf16 pairs in 64 registers, so the integer work of packing runs while the tensor cores are busy.
// Where less than half of the clusters would have a tile in the last round, its tiles are cut in
// two, 64 tokens per CTA, of which each warpgroup then computes half of the neurons.
#pragma once

#include "twell/ops/gate_gemm/gate_gemm_sm90.h"
#include "twell/ops/gate_gemm/twell_pack_sm90.cuh"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::gate_gemm {

inline constexpr int kStages = 4;  // 4 x 48 KiB of the 227 KiB a CTA can have
inline constexpr int kThreads = 384;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr uint32_t kBytesA = kTileM * kTileK * 2;
inline constexpr uint32_t kBytesB = kTileN * kTileK * 2;
inline constexpr uint32_t kStageBytes = kBytesA + kBytesB;
// Ring, its 2 * kStages barriers, and slack for aligning the ring to the 1024-byte swizzle atom.
inline constexpr uint32_t kSharedBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;

struct Shared {
  uint32_t ring;
  uint32_t full, empty;  // barriers of its stages
  __device__ explicit Shared(void* base) {
    ring = (sm90::smem_address(base) + 1023) & ~1023u;
    full = ring + kStages * kStageBytes;
    empty = full + kStages * 8;
  }
};

// What a cluster computes at a time: a tile of 256 tokens by 256 neurons, or half of one.
struct Unit {
  int row;  // first token of this CTA
  int n_tile;
  bool half;
};

// Units in the order the clusters take them: sweeps over F within a group of row tiles, so that
// what runs at one time shares few rows of x and few rows of w_gate.
struct UnitOrder {
  int m_pairs, n_tiles, group, whole;
  __device__ explicit UnitOrder(const Params& params)
      : m_pairs(params.m_pairs),
        n_tiles(params.n_tiles),
        group(params.group),
        whole(params.whole) {}
  __device__ int count() const { return whole + 2 * (m_pairs * n_tiles - whole); }
  __device__ Unit locate(int index, uint32_t rank) const {
    const bool half = index >= whole;
    const int tile = half ? whole + (index - whole) / 2 : index;
    const int per_group = group * n_tiles;
    const int first = tile / per_group * group;
    const int rows = min(group, m_pairs - first);
    const int within = tile % per_group;
    const int m_pair = first + within % rows;
    const int row = m_pair * (kCluster * kTileM) +
                    (half ? (index - whole) % 2 * kTileM + rank * (kTileM / 2) : rank * kTileM);
    return {row, within / rows, half};
  }
};

__device__ __forceinline__ void produce(const Params& params, uint32_t ring, uint32_t full,
                                        uint32_t empty, uint32_t rank) {
  using namespace sm90;
  const UnitOrder order(params);
  const int clusters = gridDim.x / kCluster;
  RingCursor<kStages> cursor;
  cursor.parity = 1;  // a fresh ring is empty
  for (int index = blockIdx.x / kCluster; index < order.count(); index += clusters) {
    if (index + clusters >= order.count()) allow_next_kernel();  // this is the last unit
    const Unit unit = order.locate(index, rank);
    const CUtensorMap* map_x = unit.half ? &params.map_x_half : &params.map_x;
    const uint32_t bytes = unit.half ? kStageBytes - kBytesA / 2 : kStageBytes;
    const int neuron = unit.n_tile * kTileN + rank * (kTileN / kCluster);
    for (int k = 0; k < params.k_steps; ++k, cursor.advance()) {
      const uint32_t a = ring + cursor.stage * kStageBytes;
      const uint32_t b = a + kBytesA + rank * (kBytesB / kCluster);
      const uint32_t landed = full + cursor.stage * 8;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      barrier_arrive_expect(landed, bytes);
      tensor_load(a, map_x, k * kTileK, unit.row, landed);
      tensor_load_multicast(b, &params.map_w, k * kTileK, neuron, landed, (1 << kCluster) - 1);
    }
  }
}

// 64 tokens by N neurons.
template <int N>
__device__ __forceinline__ void multiply_step(float (&acc)[128], uint32_t a, uint32_t b,
                                              bool accumulate) {
  using namespace sm90;
  const uint64_t operand_a = k_major_operand(a), operand_b = k_major_operand(b);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    wgmma<N, false>(acc, operand_a + k * 2, operand_b + k * 2, accumulate || k > 0);
  }
  wgmma_commit();
}

// A consumer warpgroup, across units.
struct Consumer {
  const Params& params;
  const Shared& shared;
  const int warpgroup;
  sm90::RingCursor<kStages> cursor{};
  PackedTile pending;

  // One thread per warpgroup tells both CTAs, whose copies fill this CTA's slots together.
  __device__ __forceinline__ void release(int stage) const {
    const int thread = threadIdx.x % 128;
    if (thread < kCluster) sm90::barrier_arrive_cluster(shared.empty + stage * 8, thread);
  }

  // A unit of this warpgroup's: 64 tokens by N neurons. A whole one's warpgroups share the
  // neurons, those of a half one the tokens.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[128]) {
    using namespace sm90;
    const uint32_t a = shared.ring + (N == kTileN ? warpgroup * (kBytesA / 2) : 0);
    const uint32_t b = shared.ring + kBytesA + (N == kTileN ? 0 : warpgroup * (kBytesB / 2));
    int previous = 0;
    for (int k = 0; k < params.k_steps || !pending.done(); ++k) {
      if (k < params.k_steps) {
        barrier_wait(shared.full + cursor.stage * 8, cursor.parity);
        const uint32_t offset = cursor.stage * kStageBytes;
        multiply_step<N>(acc, a + offset, b + offset, k > 0);
      }
      if (k > 0 && k < params.k_steps) {
        wgmma_wait<1>();
        release(previous);
      }
      if (k < params.k_steps) {
        previous = cursor.stage;
        cursor.advance();
      }
      // Each packing step is cold code and costs a k-step some of its slack: every other one has
      // measured better than every one. At D = 2048 all 17 steps fit the 32 k-steps.
      if (k % 2 == 1 || k == 2 || k >= params.k_steps) pending.advance(params.out);
    }
    wgmma_wait<0>();
    release(previous);
    pending.take<N>(acc);
  }
};

__device__ __forceinline__ void consume(const Params& params, const Shared& shared, uint32_t rank,
                                        int warpgroup) {
  using namespace sm90;
  const UnitOrder order(params);
  const int clusters = gridDim.x / kCluster;
  Consumer consumer{params, shared, warpgroup};
  float acc[128];
  int index = blockIdx.x / kCluster;
  for (; index < order.whole; index += clusters) {
    consumer.multiply<kTileN>(acc);
    if (index + clusters < order.count()) {
      const Unit unit = order.locate(index, rank);
      consumer.pending.begin(unit.row + warpgroup * 64, unit.n_tile);
    }
    wait_for_previous_kernel();  // row_nnz is cleared
  }
  // At most one half unit. The last unit is packed by way of the ring, which nothing writes any
  // more.
  const bool half = index < order.count();
  if (half) {
    consumer.multiply<kTileN / 2>(acc);
  } else {
    index -= clusters;
  }
  const Unit unit = order.locate(index, rank);
  named_barrier(1, kConsumers * 128);
  if (half) {
    consumer.pending.stage<kTileN / 2>(shared.ring, warpgroup);
  } else {
    consumer.pending.stage<kTileN>(shared.ring + warpgroup * (64 * kStagedRowBytes), 0);
  }
  named_barrier(1, kConsumers * 128);
  wait_for_previous_kernel();
  const int rows = min(params.out.tokens - unit.row, half ? kTileM / 2 : kTileM);
#pragma unroll 1
  for (int r = warpgroup * 4 + threadIdx.x % 128 / 32; r < rows; r += kConsumers * 4) {
    pack_row(shared.ring, r, unit.row + r, unit.n_tile, params.out);
  }
}

// Launched as dependent on a kernel that clears row_nnz, and that only began once all before it was
// complete. So row_nnz is all that has to be waited for.
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gate_gemm_sm90_kernel(const __grid_constant__ Params params) {
  using namespace sm90;
  extern __shared__ uint8_t memory[];
  const Shared shared(memory);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&params.map_x);
    prefetch_tensor_map(&params.map_x_half);
    prefetch_tensor_map(&params.map_w);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full + stage * 8, 1);
      barrier_init(shared.empty + stage * 8, kConsumers * kCluster);
    }
    fence_barrier_init();
  }
  cluster_sync();
  if (params.condition != nullptr && *params.condition == 0) {
    wait_for_previous_kernel();  // a kernel behind this one relies on it being over
    return;
  }
  const int role = threadIdx.x / 128;
  if (role == 0) {
    registers_decrease<24>();
    if (threadIdx.x == 0) produce(params, shared.ring, shared.full, shared.empty, rank);
  } else {
    registers_increase<240>();
    consume(params, shared, rank, role - 1);
  }
  __syncwarp();
  cluster_sync();  // no CTA leaves while the other may still signal its barriers
}

}  // namespace twell::gate_gemm
