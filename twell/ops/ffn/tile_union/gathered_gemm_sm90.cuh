// SPDX-License-Identifier: Apache-2.0
// Persistent GEMMs whose right operand is gathered row by row: out [128, 256] = sum over k of A[k]
// [128, 64] B[ids[k]] [64, 256 columns], where A is stored in blocks in the layout that WGMMA
// reads. Work items come from a queue.
//   warpgroup 0     loads blocks of A with bulk copies and gathers rows of B
//   warpgroups 1,2  64 rows each: WGMMA, then the problem's epilogue
// A Problem, which is the kernel parameter, has
//   bool kOrdered                 whether items wait for items of lower index
//   int4 load(int index)          the item of that index, x < 0 past the end
//   Operands operands(int4 item)  what the item multiplies
//   int32_t* taken, int width     the queue's counter; columns of B in all
//   Store                         the epilogue: constructed (problem, item) by every consumer
//                                 thread while the GEMM runs, called (acc, its warpgroup's shared
//                                 memory) afterwards
#pragma once

#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/ops/ffn/tile_union/gathered_items.cuh"

namespace twell::tile_union {

// A ring buffer of shared-memory stages that one producer warpgroup fills by 16-byte gathers and
// two consumer warpgroups read with WGMMA.

inline constexpr int kThreads = 384;
inline constexpr int kProducers = 128;
inline constexpr int kConsumerWarpgroups = 2;
// Registers: 2 * 128 * 208 + 128 * 88 = 64,512 of 65,536.
inline constexpr int kConsumerRegisters = 208;
inline constexpr int kProducerRegisters = 88;

__device__ __forceinline__ void init_ring(uint32_t full, uint32_t empty, int stages) {
  for (int stage = 0; stage < stages; ++stage) {
    gpu::barrier_init(full + stage * 8, kProducers);
    gpu::barrier_init(empty + stage * 8, kConsumerWarpgroups);
  }
}

// The producer's side.
template <int Stages>
struct GatherRing {
  uint32_t full;
  uint32_t empty;
  gpu::RingCursor<Stages> cursor{0, 1};  // a new ring buffer is empty

  // Waits for the stage to be free and returns its index.
  __device__ __forceinline__ int acquire() const {
    gpu::barrier_wait(empty + cursor.stage * 8, cursor.parity);
    return cursor.stage;
  }
  // Marks the stage full once this thread's gathers, and those of all others, have arrived.
  __device__ __forceinline__ void commit() {
    gpu::gather_arrive(full + cursor.stage * 8);
    cursor.advance();
  }
};

// The consumers' side.
template <int Stages>
struct StageReader {
  uint32_t full;
  uint32_t empty;
  gpu::RingCursor<Stages> cursor{};

  // Waits for the stage to be full and returns its index.
  __device__ __forceinline__ int wait() const {
    gpu::barrier_wait(full + cursor.stage * 8, cursor.parity);
    gpu::fence_async_shared();  // gathers write through the generic proxy, WGMMA reads through the
                                // async proxy
    return cursor.stage;
  }
  __device__ __forceinline__ void advance() { cursor.advance(); }
  // One thread per warpgroup releases the stage.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 128 == 0) gpu::barrier_arrive(empty + stage * 8);
  }
};

// Hands work items to all roles of a CTA, first come first served across the grid, so that CTAs
// with large items take fewer. Which CTA computes an item does not change its result. One thread,
// the feeder, fetches the index two items ahead and the item one ahead, so that it never waits for
// memory.
struct ItemFeed {
  static constexpr int kSlots = 4;
  static constexpr int kNotYet = -2;  // x of an item that has to be loaded again later
  static constexpr uint32_t kBytes = kSlots * (16 + 8 + 8);
  uint32_t base;  // slots, then full and empty barriers; 16-byte aligned
  gpu::RingCursor<kSlots> cursor{};

  __device__ __forceinline__ uint32_t full(int slot) const { return base + kSlots * 16 + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return full(slot) + kSlots * 8; }
  __device__ __forceinline__ void init(int threads = kThreads) const {
    for (int slot = 0; slot < kSlots; ++slot) {
      gpu::barrier_init(full(slot), 1);
      gpu::barrier_init(empty(slot), threads);
    }
  }
  // Every thread of the CTA takes every item.
  __device__ __forceinline__ int4 take() {
    gpu::barrier_wait(full(cursor.stage), cursor.parity);
    int4 item;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item.x), "=r"(item.y), "=r"(item.z), "=r"(item.w)
                 : "r"(base + cursor.stage * 16)
                 : "memory");
    gpu::barrier_arrive(empty(cursor.stage));
    cursor.advance();
    return item;
  }
};

// The feeder's side: thread 0 of the CTA; calls of other threads do nothing. Load maps an index to
// an int4, with a negative x past the end, or kNotYet. FirstByCta: CTA i starts with item i, which
// saves an atomic. It must be false where an item waits for an earlier one, because a CTA that does
// not run yet would hold its first item back.
template <typename Load, bool FirstByCta = true>
struct ItemFeeder {
  ItemFeed feed;
  int32_t* counter;  // starts at 0
  Load load;
  int4 next_item;
  int item_index, next_index;
  gpu::RingCursor<ItemFeed::kSlots> cursor{0, 1};

  __device__ __forceinline__ ItemFeeder(const ItemFeed& feed_in, int32_t* counter_in,
                                        const Load& load_in)
      : feed(feed_in), counter(counter_in), load(load_in) {
    if (threadIdx.x == 0) fetch(FirstByCta ? blockIdx.x : atomicAdd(counter, 1));
  }
  __device__ __forceinline__ void publish() {
    if (threadIdx.x != 0) return;
    gpu::barrier_wait(feed.empty(cursor.stage), cursor.parity);
    while (next_item.x == ItemFeed::kNotYet) {
      __nanosleep(100);
      next_item = load(item_index);
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(feed.base + cursor.stage * 16),
                 "r"(next_item.x), "r"(next_item.y), "r"(next_item.z), "r"(next_item.w)
                 : "memory");
    gpu::barrier_arrive(feed.full(cursor.stage));
    cursor.advance();
    fetch(next_index);
  }

 private:
  __device__ __forceinline__ void fetch(int index) {
    item_index = index;
    next_item = load(index);
    next_index = (FirstByCta ? gridDim.x : 0) + atomicAdd(counter, 1);
  }
};

}  // namespace twell::tile_union

namespace twell::tile_union::gathered {

inline constexpr int kStages = 4;
inline constexpr uint32_t kColumnBlockBytes = kBlock * 128;  // 64 rows by 64 columns
inline constexpr uint32_t kBytesB = kColumns / 64 * kColumnBlockBytes;
inline constexpr uint32_t kStageBytes = kBytesA + kBytesB;
// Per warpgroup, a buffer for results before their store to global memory: 64 rows of 256 bytes.
inline constexpr uint32_t kOutBytes = 64 * 256;
inline constexpr uint32_t kSharedBytes = kStages * kStageBytes + kConsumerWarpgroups * kOutBytes +
                                         2 * kStages * 8 + ItemFeed::kBytes +
                                         1024;  // alignment to the swizzle atom

struct Shared {
  uint32_t ring, out, feed, full, empty;
  __device__ explicit Shared(void* base) {
    ring = (gpu::smem_address(base) + 1023) & ~1023u;
    out = ring + kStages * kStageBytes;
    feed = out + kConsumerWarpgroups * kOutBytes;
    full = feed + ItemFeed::kBytes;
    empty = full + kStages * 8;
  }
};

template <bool Overlaps, typename Problem>
__device__ __forceinline__ void produce(const Problem& problem, const Shared& shared) {
  using namespace gpu;
  GatherRing<kStages> ring{shared.full, shared.empty};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pieces = problem.width / 8;
  // Warp w gathers rows 16 w .. 16 w + 15 of a block; lane l gathers piece l of a row's 512 bytes.
  const uint32_t dst_lane = kBytesA + lane / 8 * kColumnBlockBytes + warp * 16 * 128;
  if constexpr (Overlaps) {
    if (threadIdx.x == 0) problem.wait_for_items();
    __syncwarp();
  }
  ItemFeed feed{shared.feed};
  const auto load = [&](int index) { return problem.load(index); };
  ItemFeeder<decltype(load), !Problem::kOrdered> feeder(feed, problem.taken, load);
  for (;;) {
    feeder.publish();
    const int4 item = feed.take();
    // The vote tells the compiler that warps are converged below. Without it values that are
    // uniform over a warp take registers of every lane, and gathering becomes the bottleneck.
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
  using namespace gpu;
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
    gpu::fence_barrier_init();
  }
  __syncthreads();
  if constexpr (!Overlaps) gpu::wait_for_previous_kernel();
  if (threadIdx.x < kProducers) {
    gpu::registers_decrease<kProducerRegisters>();
    produce<Overlaps>(problem, shared);
  } else {
    gpu::registers_increase<kConsumerRegisters>();
    consume(problem, shared);
  }
  // Our successor waits only for us, so we must outlive our predecessor.
  if constexpr (Overlaps) gpu::wait_for_previous_kernel();
}

// Overlaps: the kernel starts while its predecessor runs. The problem's wait_for_items() waits for
// what load and operands read, and Operands::ready covers what the predecessor writes.
template <bool Overlaps = false, typename Problem>
cudaError_t launch(const Problem& problem, int ctas, cudaStream_t stream) {
  const auto kernel = gathered_gemm_sm90_kernel<Overlaps, Problem>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(ctas), kThreads, kSharedBytes, stream, problem);
}

}  // namespace twell::tile_union::gathered
