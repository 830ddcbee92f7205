// SPDX-License-Identifier: Apache-2.0
// out [M, N] = a [M, K] b [N, K]^T for Hopper, with an epilogue that runs behind the next tile's
// products (paired_gemm_loop_sm90.cuh). An Epilogue, kept by every consumer thread, has
//   Target                        what it writes to, a kernel parameter
//   kSharedBytes                  shared memory it needs, for all warps together
//   kSpread                       whether its steps are spread as may_spread says, or run in every
//                                 other k-step: each is cold code and costs a k-step some of its
//                                 slack, but past the last k-step nothing hides it
//   take(acc, row, column_tile)   takes over a warpgroup's 64 rows from `row` on
//   advance(target, shared)       runs its next step: short enough to hide behind one k-step
//   done()                        nothing is left of what it took; true at the start
//   finish()                      waits for pending stores; called before the kernel ends
#pragma once

#include "twell/ops/matmul/paired_gemm_loop_sm90.cuh"

namespace twell::paired_gemm {

// The k-steps of a tile in which spread steps run: kSpreadFirst, then every kSpreadEvery-th.
inline constexpr int kSpreadFirst = 4, kSpreadEvery = 3;
// Whether `steps` steps all find a k-step.
constexpr bool may_spread(int steps, int k_steps) {
  return kSpreadFirst + kSpreadEvery * (steps - 1) < k_steps;
}

__device__ __forceinline__ void produce(const Operands& operands, const Ring& ring, uint32_t rank) {
  const TileOrder order{operands.m_pairs, operands.n_tiles, operands.group};
  const int clusters = gridDim.x / kCluster;
  Producer producer{ring, rank};
  for (int tile = blockIdx.x / kCluster; tile < order.count(); tile += clusters) {
    const int row = (order.m_pair(tile) * kCluster + rank) * kTileM;
    producer.load(operands.map_a, row, operands.map_b, order.n_tile(tile), operands.k_steps);
  }
}

template <typename Epilogue>
__device__ __forceinline__ void consume(const Operands& operands,
                                        const typename Epilogue::Target& target, const Ring& ring,
                                        uint32_t shared, uint32_t rank, int warpgroup) {
  using namespace sm90;
  const TileOrder order{operands.m_pairs, operands.n_tiles, operands.group};
  const int clusters = gridDim.x / kCluster;
  float acc[128];
  Epilogue pending;
  RingCursor<kStages> cursor;
  // One round more than tiles, without k-steps, runs the last tile's epilogue.
  for (int tile = blockIdx.x / kCluster;; tile += clusters) {
    const int k_steps = tile < order.count() ? operands.k_steps : 0;
    int previous = 0;
    for (int k = 0; k < k_steps || !pending.done(); ++k) {
      if (k < k_steps) {
        barrier_wait(ring.full + cursor.stage * 8, cursor.parity);
        const uint32_t stage = ring.stages + cursor.stage * kStageBytes;
        multiply_step<kTileN>(acc, stage + warpgroup * (kBytesA / 2), stage + kBytesA, k > 0);
      }
      if (k > 0 && k < k_steps) {
        wgmma_wait<1>();
        release(ring, previous);
      }
      if (k < k_steps) {
        previous = cursor.stage;
        cursor.advance();
      }
      const bool now = Epilogue::kSpread
                           ? k >= kSpreadFirst && k % kSpreadEvery == kSpreadFirst % kSpreadEvery
                           : k % 2 == 1 || k == 2;
      if (now || k >= k_steps) pending.advance(target, shared);
    }
    if (k_steps == 0) break;
    wgmma_wait<0>();
    release(ring, previous);
    pending.take(acc, (order.m_pair(tile) * kCluster + rank) * kTileM + warpgroup * 64,
                 order.n_tile(tile));
  }
  pending.finish();
}

// The body of a kernel of kThreads threads in clusters of kCluster, with kRingBytes +
// Epilogue::kSharedBytes of dynamic shared memory.
template <typename Epilogue>
__device__ __forceinline__ void run(const Operands& operands,
                                    const typename Epilogue::Target& target, void* memory) {
  using namespace sm90;
  const Ring ring(memory, Epilogue::kSharedBytes);
  const uint32_t shared = ring.stages + kStages * kStageBytes;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&operands.map_a);
    prefetch_tensor_map(&operands.map_b);
    ring.init();
  }
  cluster_sync();
  run_roles(
      [&] { produce(operands, ring, rank); },
      [&](int warpgroup) { consume<Epilogue>(operands, target, ring, shared, rank, warpgroup); });
}

}  // namespace twell::paired_gemm
