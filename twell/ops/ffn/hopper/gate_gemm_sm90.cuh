// SPDX-License-Identifier: Apache-2.0
// The gate GEMM for Hopper: x w_gate^T, whose tiles of 256 neurons are TwELL's
// (paired_gemm_loop_sm90.cuh). Packing a tile is deferred, in steps, into the next tile's first
// k-steps: its activations wait as bf16 pairs in 64 registers, so the integer work of packing runs
// while the tensor cores are busy. Where less than half of the clusters would have a tile in the
// last round, its tiles are cut in two, 64 tokens per CTA, of which each warpgroup then computes
// half of the neurons.
#pragma once

#include "twell/ops/ffn/hopper/gate_gemm_sm90.h"
#include "twell/ops/ffn/hopper/twell_pack_sm90.cuh"
#include "twell/ops/matmul/paired_gemm_loop_sm90.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::gate_gemm {

using paired_gemm::kBytesA;
using paired_gemm::kBytesB;
using paired_gemm::kConsumers;
using paired_gemm::kStageBytes;
using paired_gemm::kStages;
using paired_gemm::kThreads;
using paired_gemm::multiply_step;
using paired_gemm::Producer;
using paired_gemm::Ring;

// What a cluster computes at a time: a tile of 256 tokens by 256 neurons, or half of one.
struct Unit {
  int row;  // first token of this CTA
  int n_tile;
  bool half;
};

// Units in the order the clusters take them: whole tiles, then halves.
struct UnitOrder {
  paired_gemm::TileOrder tiles;
  int whole;
  __device__ explicit UnitOrder(const Params& params)
      : tiles{params.m_pairs, params.n_tiles, params.group}, whole(params.whole) {}
  __device__ int count() const { return whole + 2 * (tiles.count() - whole); }
  __device__ Unit locate(int index, uint32_t rank) const {
    const bool half = index >= whole;
    const int tile = half ? whole + (index - whole) / 2 : index;
    const int row = tiles.m_pair(tile) * (kCluster * kTileM) +
                    (half ? (index - whole) % 2 * kTileM + rank * (kTileM / 2) : rank * kTileM);
    return {row, tiles.n_tile(tile), half};
  }
};

__device__ __forceinline__ void produce(const Params& params, const Ring& ring, uint32_t rank) {
  const UnitOrder order(params);
  const int clusters = gridDim.x / kCluster;
  Producer producer{ring, rank};
  for (int index = blockIdx.x / kCluster; index < order.count(); index += clusters) {
    if (index + clusters >= order.count()) {
      // This is the last unit. What starts now may rely on what is cleared in front of this kernel.
      sm90::wait_for_previous_kernel();
      sm90::allow_next_kernel();
    }
    const Unit unit = order.locate(index, rank);
    producer.load(unit.half ? params.map_x_half : params.map_x, unit.row, params.map_w, unit.n_tile,
                  params.k_steps, unit.half ? kStageBytes - kBytesA / 2 : kStageBytes);
  }
}

// Of a CTA, for Params::packed. Consumers say what they have packed, and a thread of its own tells
// the rest of the device: it, not they, waits until their stores have arrived there. Units are not
// told of one by one, since anything more in the loop over k-steps costs whole percents.
struct PackedUnits {
  // Before the last but one of the whole units; the last but one; the last; a half one. What a CTA
  // does not have counts as packed with the phase before.
  enum Phase { kEarlier, kLastButOne, kLastWhole, kHalf, kPhases };
  static constexpr uint32_t kBytes = kPhases * 8;
  uint32_t barriers;  // one per phase, used once

  __device__ explicit PackedUnits(const Ring& ring) : barriers(ring.full - kBytes) {}
  __device__ __forceinline__ void init() const {
    for (int phase = 0; phase < kPhases; ++phase) {
      sm90::barrier_init(barriers + phase * 8, kConsumers * 4);
    }
  }
  // By each consumer warp.
  __device__ __forceinline__ void arrive(Phase phase) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(barriers + phase * 8);
  }
  __device__ __forceinline__ void tell(const Params& params) const {
    if (params.packed == nullptr) return;
    const int index = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const int whole = (params.whole - index + clusters - 1) / clusters;
    const bool has[kPhases] = {whole > 1, whole > 0, whole > 0,
                               index + whole * clusters < UnitOrder(params).count()};
    sm90::wait_for_previous_kernel();  // the counters are cleared
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      if (has[phase]) sm90::barrier_wait(barriers + phase * 8, 0);
      sm90::add_release(params.packed + phase, 1);
    }
  }
};

inline constexpr uint32_t kSharedBytes = paired_gemm::kRingBytes + PackedUnits::kBytes;

// A consumer warpgroup, across units.
struct Consumer {
  const Params& params;
  const Ring& ring;
  const PackedUnits& units;
  const int warpgroup;
  sm90::RingCursor<kStages> cursor{};
  PackedTile pending;

  // A unit of this warpgroup's: 64 tokens by N neurons. A whole one's warpgroups share the
  // neurons, those of a half one the tokens.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[128]) {
    using namespace sm90;
    const uint32_t a = ring.stages + (N == kTileN ? warpgroup * (kBytesA / 2) : 0);
    const uint32_t b = ring.stages + kBytesA + (N == kTileN ? 0 : warpgroup * (kBytesB / 2));
    int previous = 0;
    for (int k = 0; k < params.k_steps || !pending.done(); ++k) {
      if (k < params.k_steps) {
        barrier_wait(ring.full + cursor.stage * 8, cursor.parity);
        const uint32_t offset = cursor.stage * kStageBytes;
        multiply_step<N>(acc, a + offset, b + offset, k > 0);
      }
      if (k > 0 && k < params.k_steps) {
        wgmma_wait<1>();
        release(ring, previous);
      }
      if (k < params.k_steps) {
        previous = cursor.stage;
        cursor.advance();
      }
      // Steps one k-step after another, or at once where a tile begins, cost more than they hide.
      // At D = 2048 all 10 have room.
      if ((k >= 3 && k % 2 == 1) || k >= params.k_steps) {
        const bool packing = !pending.done();
        pending.advance(params.out);
        if (N < kTileN && packing && pending.done()) units.arrive(PackedUnits::kLastWhole);
      }
    }
    wgmma_wait<0>();
    release(ring, previous);
    pending.take<N>(acc);
  }
};

__device__ __forceinline__ void consume(const Params& params, const Ring& ring,
                                        const PackedUnits& units, uint32_t rank, int warpgroup) {
  using namespace sm90;
  const UnitOrder order(params);
  const int clusters = gridDim.x / kCluster;
  Consumer consumer{params, ring, units, warpgroup};
  float acc[128];
  int index = blockIdx.x / kCluster;
  for (; index < order.whole; index += clusters) {
    consumer.multiply<kTileN>(acc);
    if (index + clusters < order.count()) {
      const Unit unit = order.locate(index, rank);
      consumer.pending.begin(unit.row + warpgroup * 64, unit.n_tile);
    }
    // The units before this one are packed.
    if (index + clusters >= order.whole) {
      units.arrive(PackedUnits::kLastButOne);
    } else if (index + 2 * clusters >= order.whole) {
      units.arrive(PackedUnits::kEarlier);
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
    consumer.pending.stage<kTileN / 2>(ring.stages, warpgroup);
  } else {
    consumer.pending.stage<kTileN>(ring.stages + warpgroup * (64 * kStagedRowBytes), 0);
  }
  named_barrier(1, kConsumers * 128);
  wait_for_previous_kernel();
  const int rows = min(params.out.tokens - unit.row, half ? kTileM / 2 : kTileM);
#pragma unroll 4
  for (int r = warpgroup * 4 + threadIdx.x % 128 / 32; r < rows; r += kConsumers * 4) {
    pack_row(ring.stages, r, unit.row + r, unit.n_tile, params.out);
  }
  units.arrive(half ? PackedUnits::kHalf : PackedUnits::kLastWhole);
}

// Launched as dependent on a kernel that clears row_nnz, and that only began once all before it was
// complete. So row_nnz is all that has to be waited for.
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gate_gemm_sm90_kernel(const __grid_constant__ Params params) {
  using namespace sm90;
  extern __shared__ uint8_t memory[];
  const Ring ring(memory, PackedUnits::kBytes);
  const PackedUnits units(ring);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&params.map_x);
    prefetch_tensor_map(&params.map_x_half);
    prefetch_tensor_map(&params.map_w);
    units.init();
    ring.init();
  }
  cluster_sync();
  if (params.condition != nullptr && *params.condition == 0) {
    wait_for_previous_kernel();  // a kernel behind this one relies on it being over
    return;
  }
  paired_gemm::run_roles([&] { produce(params, ring, rank); },
                         [&](int warpgroup) { consume(params, ring, units, rank, warpgroup); },
                         [&] { units.tell(params); });
}

}  // namespace twell::gate_gemm
