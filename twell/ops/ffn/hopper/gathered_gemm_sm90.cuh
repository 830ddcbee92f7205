// SPDX-License-Identifier: Apache-2.0
// GEMMs whose right operand is gathered row by row:  out [128, 256] = sum over k of
// A[k] [128, 64] B[ids[k]] [64, 256 columns], A being blocks in the image WGMMA reads. Persistent;
// work items come from a queue.
//   warpgroup 0     bulk-copies blocks of A and gathers rows of B
//   warpgroups 1,2  64 rows each: WGMMA, then whatever the problem does with the result
// A Problem, a kernel parameter, has
//   int4 load(int index)          the item of that index, x < 0 past the end
//   Operands operands(int4 item)  what the item multiplies
//   int32_t* taken, int width     the queue's counter; columns of B in all
//   Store                         constructed (problem, item) by every consumer thread while the
//                                 GEMM runs, called (acc, shared memory of its warpgroup) after it
#pragma once

#include "twell/ops/ffn/hopper/gather_ring_sm90.cuh"
#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::tile_union::gathered {

inline constexpr int kStages = 4;
inline constexpr uint32_t kBytesA = kTileTokens * kBlock * 2;
inline constexpr uint32_t kColumnBlockBytes = kBlock * 128;  // 64 rows by 64 columns
inline constexpr uint32_t kBytesB = kColumns / 64 * kColumnBlockBytes;
inline constexpr uint32_t kStageBytes = kBytesA + kBytesB;
// Of each warpgroup, for results on their way out: 64 rows of 256 bytes.
inline constexpr uint32_t kOutBytes = 64 * 256;
inline constexpr uint32_t kSharedBytes = kStages * kStageBytes + kConsumerWarpgroups * kOutBytes +
                                         2 * kStages * 8 + ItemFeed::kBytes +
                                         1024;  // alignment to the swizzle atom

// Up to two sums over the same ids, one after the other.
struct Operands {
  const uint8_t* a[2];  // [blocks] of kBytesA
  const uint4* b[2];    // rows of `width` bf16
  const int32_t* ids;   // rows of B
  int positions;        // ids there are; negative ones, and those past the end, count as 0
  int blocks;           // of 64 ids
  int passes;           // 1 or 2
  int column;           // first of 256
  // Of a problem that overlaps the kernel in front: A may be read once *ready is at least `until`.
  const int32_t* ready = nullptr;
  int until = 0;

  __device__ __forceinline__ int k_steps() const { return blocks * passes; }
};

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

template <bool Overlaps, typename Problem>
__device__ __forceinline__ void produce(const Problem& problem, const Shared& shared) {
  using namespace sm90;
  GatherRing<kStages> ring{shared.full, shared.empty};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = problem.width / 8;
  // Warp w gathers rows 16 w .. 16 w + 15 of a block; lane l piece l of a row's 512 bytes.
  const uint32_t dst_lane = kBytesA + lane / 8 * kColumnBlockBytes + warp * 16 * 128;
  if constexpr (Overlaps) {
    if (threadIdx.x == 0) problem.wait_for_items();
    __syncwarp();
  }
  ItemFeed feed{shared.feed};
  ItemFeeder feeder(feed, problem.taken, [&](int index) { return problem.load(index); });
  for (;;) {
    feeder.publish();
    const int4 item = feed.take();
    // By a vote, so that the compiler knows warps to be whole below. Otherwise it keeps what is the
    // same for all lanes in registers of each, and gathering, not the tensor cores, sets the pace.
    if (__any_sync(~0u, item.x < 0)) break;
    const Operands operands = problem.operands(item);
    const bool inside = operands.column + lane * 8 < problem.width;
    const auto load_id = [&](int block) {
      const int position = block * kBlock + warp * 16 + lane % 16;
      return position < operands.positions ? operands.ids[position] : -1;
    };
    if constexpr (Overlaps) {
      if (threadIdx.x == 0 && operands.blocks > 0) {
        while (load_acquire(operands.ready) < operands.until) __nanosleep(40);
        fence_async_global();
      }
      __syncwarp();  // without it the warp gathers in two halves, several times slower
    }
    for (int pass = 0; pass < operands.passes; ++pass) {
      const uint8_t* a = pass == 0 ? operands.a[0] : operands.a[1];
      const uint4* b = (pass == 0 ? operands.b[0] : operands.b[1]) + operands.column / 8 + lane;
      int next_id = load_id(0);
      for (int block = 0; block < operands.blocks; ++block, a += kBytesA) {
        const int id = next_id;
        next_id = load_id(block + 1);
        const int index_of_stage = ring.acquire();
        const uint32_t stage = shared.ring + index_of_stage * kStageBytes;
        if (threadIdx.x == 0) {
          const uint32_t landed = shared.full + index_of_stage * 8;
          barrier_expect(landed, kBytesA);
          bulk_load(stage, a, kBytesA, landed);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int row = __shfl_sync(~0u, id, i);
          const bool valid = inside && row >= 0;
          gather16(stage + dst_lane + i * 128 + ((lane % 8) ^ (i % 8)) * 16,
                   b + (valid ? int64_t{row} * pieces : 0), valid);
        }
        ring.commit();
      }
    }
  }
}

template <typename Problem>
__device__ __forceinline__ void consume(const Problem& problem, const Shared& shared) {
  using namespace sm90;
  const int warpgroup = threadIdx.x / 128 - 1;
  ItemFeed feed{shared.feed};
  StageReader<kStages> ring{shared.full, shared.empty};
  float acc[128];
  for (;;) {
    const int4 item = feed.take();
    if (item.x < 0) break;
    typename Problem::Store store(problem, item);
    const int k_steps = problem.operands(item).k_steps();
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
    store(acc, shared.out + warpgroup * kOutBytes);
  }
}

template <bool Overlaps, typename Problem>
__global__ void __launch_bounds__(kThreads, 1)
    gathered_gemm_sm90_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ uint8_t memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    init_ring(shared.full, shared.empty, kStages);
    ItemFeed{shared.feed}.init();
    sm90::fence_barrier_init();
  }
  __syncthreads();
  if constexpr (!Overlaps) sm90::wait_for_previous_kernel();
  if (threadIdx.x < kProducers) {
    sm90::registers_decrease<kProducerRegisters>();
    produce<Overlaps>(problem, shared);
  } else {
    sm90::registers_increase<kConsumerRegisters>();
    consume(problem, shared);
  }
  // What comes next relies on the kernel in front being over too.
  if constexpr (Overlaps) sm90::wait_for_previous_kernel();
}

// Overlaps: the problem has wait_for_items(), for what load and operands read, Operands::ready
// tells what the kernel in front has written, and this one waits for nothing else.
template <bool Overlaps = false, typename Problem>
cudaError_t launch(const Problem& problem, int ctas, cudaStream_t stream) {
  const auto kernel = gathered_gemm_sm90_kernel<Overlaps, Problem>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(kernel, dim3(ctas), kThreads, kSharedBytes, stream, problem);
}

}  // namespace twell::tile_union::gathered
