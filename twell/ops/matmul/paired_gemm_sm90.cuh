// SPDX-License-Identifier: Apache-2.0
// out [M, N] = a [M, K] b [N, K]^T for Hopper, with an epilogue that runs behind the next tile's
// products. Persistent; clusters of two CTAs, each CTA an output tile of 128 rows by 256 columns;
// the two CTAs of a cluster share their columns and load half of b's tile each, multicast to both.
//   warpgroup 0     one thread feeds a ring of kStages k-steps through the copy engine
//   warpgroups 1,2  64 rows each: WGMMA, then the epilogue
// An Epilogue, kept by every consumer thread, has
//   Target                        what it writes to, a kernel parameter
//   kSharedBytes                  shared memory it wants, of all warps together
//   take(acc, row, column_tile)   takes over a warpgroup's 64 rows from `row` on
//   advance(target, shared)       runs its next step: short enough to hide behind one k-step
//   done()                        nothing is left of what it took; so at the start
#pragma once

#include "twell/ops/matmul/paired_gemm_sm90.h"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::paired_gemm {

inline constexpr int kStages = 4;  // 4 x 48 KiB of the 227 KiB a CTA can have
inline constexpr int kThreads = 384;
inline constexpr uint32_t kBytesA = kTileM * kTileK * 2;
inline constexpr uint32_t kBytesB = kTileN * kTileK * 2;
inline constexpr uint32_t kStageBytes = kBytesA + kBytesB;
// Ring, its 2 * kStages barriers, and slack for aligning the ring to the 1024-byte swizzle atom.
inline constexpr uint32_t kRingBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;

// Output tiles in the order the clusters take them: sweeps over N within a group of row tiles, so
// that what runs at one time shares few rows of a and few rows of b.
struct TileOrder {
  int m_pairs, n_tiles, group;
  __device__ int count() const { return m_pairs * n_tiles; }
  __device__ void locate(int index, int& m_pair, int& n_tile) const {
    const int per_group = group * n_tiles;
    const int first = index / per_group * group;
    const int rows = min(group, m_pairs - first);
    const int within = index % per_group;
    m_pair = first + within % rows;
    n_tile = within / rows;
  }
};

__device__ __forceinline__ void produce(const Operands& operands, uint32_t ring, uint32_t full,
                                        uint32_t empty, uint32_t rank) {
  using namespace sm90;
  const TileOrder order{operands.m_pairs, operands.n_tiles, operands.group};
  const int clusters = gridDim.x / kCluster;
  RingCursor<kStages> cursor;
  cursor.parity = 1;  // a fresh ring is empty
  for (int tile = blockIdx.x / kCluster; tile < order.count(); tile += clusters) {
    int m_pair, n_tile;
    order.locate(tile, m_pair, n_tile);
    const int row = (m_pair * kCluster + rank) * kTileM;
    const int column = n_tile * kTileN + rank * (kTileN / kCluster);
    for (int k = 0; k < operands.k_steps; ++k, cursor.advance()) {
      const uint32_t a = ring + cursor.stage * kStageBytes;
      const uint32_t b = a + kBytesA + rank * (kBytesB / kCluster);
      const uint32_t landed = full + cursor.stage * 8;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      barrier_arrive_expect(landed, kStageBytes);
      tensor_load(a, &operands.map_a, k * kTileK, row, landed);
      tensor_load_multicast(b, &operands.map_b, k * kTileK, column, landed, (1 << kCluster) - 1);
    }
  }
}

__device__ __forceinline__ void multiply_step(float (&acc)[128], uint32_t stage, int warpgroup,
                                              bool accumulate) {
  using namespace sm90;
  const uint64_t a = k_major_operand(stage + warpgroup * (kBytesA / 2));
  const uint64_t b = k_major_operand(stage + kBytesA);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK / 16; ++k) {
    wgmma<kTileN, false>(acc, a + k * 2, b + k * 2, accumulate || k > 0);
  }
  wgmma_commit();
}

template <typename Epilogue>
__device__ __forceinline__ void consume(const Operands& operands,
                                        const typename Epilogue::Target& target, uint32_t ring,
                                        uint32_t full, uint32_t empty, uint32_t shared,
                                        uint32_t rank, int warpgroup) {
  using namespace sm90;
  const TileOrder order{operands.m_pairs, operands.n_tiles, operands.group};
  const int clusters = gridDim.x / kCluster;
  const int thread = threadIdx.x % 128;
  // One thread per warpgroup tells both CTAs, whose copies fill this CTA's slots together.
  const auto release = [&](int stage) {
    if (thread < kCluster) barrier_arrive_cluster(empty + stage * 8, thread);
  };
  float acc[128];
  Epilogue pending;
  RingCursor<kStages> cursor;
  // One round more than there are tiles, without k-steps, for the last one's epilogue.
  for (int tile = blockIdx.x / kCluster;; tile += clusters) {
    const int k_steps = tile < order.count() ? operands.k_steps : 0;
    int previous = 0;
    for (int k = 0; k < k_steps || !pending.done(); ++k) {
      if (k < k_steps) {
        barrier_wait(full + cursor.stage * 8, cursor.parity);
        multiply_step(acc, ring + cursor.stage * kStageBytes, warpgroup, k > 0);
      }
      if (k > 0 && k < k_steps) {
        wgmma_wait<1>();
        release(previous);
      }
      if (k < k_steps) {
        previous = cursor.stage;
        cursor.advance();
      }
      // Each step is cold code and costs a k-step some of its slack: every other one has measured
      // better than every one.
      if (k % 2 == 1 || k == 2 || k >= k_steps) pending.advance(target, shared);
    }
    if (k_steps == 0) break;
    wgmma_wait<0>();
    release(previous);
    int m_pair, n_tile;
    order.locate(tile, m_pair, n_tile);
    pending.take(acc, (m_pair * kCluster + rank) * kTileM + warpgroup * 64, n_tile);
  }
}

// The body of a kernel of kThreads threads in clusters of kCluster, with kRingBytes +
// Epilogue::kSharedBytes of dynamic shared memory.
template <typename Epilogue>
__device__ __forceinline__ void run(const Operands& operands,
                                    const typename Epilogue::Target& target, void* memory) {
  using namespace sm90;
  const uint32_t ring = (smem_address(memory) + 1023) & ~1023u;
  const uint32_t shared = ring + kStages * kStageBytes;
  const uint32_t full = shared + Epilogue::kSharedBytes;
  const uint32_t empty = full + kStages * 8;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&operands.map_a);
    prefetch_tensor_map(&operands.map_b);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + stage * 8, 1);
      barrier_init(empty + stage * 8, 2 * kCluster);  // both warpgroups of both CTAs
    }
    fence_barrier_init();
  }
  cluster_sync();
  const int role = threadIdx.x / 128;
  if (role == 0) {
    registers_decrease<24>();
    if (threadIdx.x == 0) produce(operands, ring, full, empty, rank);
  } else {
    registers_increase<240>();
    consume<Epilogue>(operands, target, ring, full, empty, shared, rank, role - 1);
  }
  __syncwarp();
  cluster_sync();  // no CTA leaves while the other may still signal its barriers
}

}  // namespace twell::paired_gemm
