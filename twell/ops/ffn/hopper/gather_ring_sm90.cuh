// SPDX-License-Identifier: Apache-2.0
// A ring of shared-memory stages filled by one producer warpgroup through 16-byte gathers and read
// by WGMMA in two consumer warpgroups.
#pragma once

#include "twell/sm90/barrier.cuh"
#include "twell/sm90/copy.cuh"

namespace twell::tile_union {

inline constexpr int kThreads = 384;
inline constexpr int kProducers = 128;
inline constexpr int kConsumerWarpgroups = 2;
// 65,536 registers: 2 * 128 * 208 + 128 * 88 = 64,512.
inline constexpr int kConsumerRegisters = 208;
inline constexpr int kProducerRegisters = 88;

__device__ __forceinline__ void init_ring(uint32_t full, uint32_t empty, int stages) {
  for (int stage = 0; stage < stages; ++stage) {
    sm90::barrier_init(full + stage * 8, kProducers);
    sm90::barrier_init(empty + stage * 8, kConsumerWarpgroups);
  }
}

// The producer's end.
template <int Stages>
struct GatherRing {
  uint32_t full;
  uint32_t empty;
  sm90::RingCursor<Stages> cursor{0, 1};  // a fresh ring is empty

  // Waits for the stage to be free and returns its index.
  __device__ __forceinline__ int acquire() const {
    sm90::barrier_wait(empty + cursor.stage * 8, cursor.parity);
    return cursor.stage;
  }
  // The stage is full once this thread's gathers, and everyone else's, have landed.
  __device__ __forceinline__ void commit() {
    sm90::gather_arrive(full + cursor.stage * 8);
    cursor.advance();
  }
};

// The consumers' end.
template <int Stages>
struct StageReader {
  uint32_t full;
  uint32_t empty;
  sm90::RingCursor<Stages> cursor{};

  // Waits for the stage to be full and returns its index.
  __device__ __forceinline__ int wait() const {
    sm90::barrier_wait(full + cursor.stage * 8, cursor.parity);
    sm90::fence_async_shared();  // gathers are ordinary writes, WGMMA reads by the async proxy
    return cursor.stage;
  }
  __device__ __forceinline__ void advance() { cursor.advance(); }
  // One thread per warpgroup hands the stage back.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 128 == 0) sm90::barrier_arrive(empty + stage * 8);
  }
};

// Hands work items to all roles of a CTA, first come first served across the grid, so that CTAs
// with large items take fewer. Who computes an item does not change its result. One thread, the
// feeder, fetches: the index two items ahead, the item itself one ahead, so that it never waits for
// memory.
struct ItemFeed {
  static constexpr int kSlots = 4;
  static constexpr int kNotYet = -2;  // x of an item that has to be asked for again
  static constexpr uint32_t kBytes = kSlots * (16 + 8 + 8);
  uint32_t base;  // slots, then full and empty barriers; 16-byte aligned
  sm90::RingCursor<kSlots> cursor{};

  __device__ __forceinline__ uint32_t full(int slot) const { return base + kSlots * 16 + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return full(slot) + kSlots * 8; }
  __device__ __forceinline__ void init(int threads = kThreads) const {
    for (int slot = 0; slot < kSlots; ++slot) {
      sm90::barrier_init(full(slot), 1);
      sm90::barrier_init(empty(slot), threads);
    }
  }
  // Every thread of the CTA takes every item.
  __device__ __forceinline__ int4 take() {
    sm90::barrier_wait(full(cursor.stage), cursor.parity);
    int4 item;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item.x), "=r"(item.y), "=r"(item.z), "=r"(item.w)
                 : "r"(base + cursor.stage * 16)
                 : "memory");
    sm90::barrier_arrive(empty(cursor.stage));
    cursor.advance();
    return item;
  }
};

// The feeder's end: thread 0 of the CTA; the others' calls do nothing. Load: index -> int4, with a
// negative x for indices past the end, or kNotYet.
template <typename Load>
struct ItemFeeder {
  ItemFeed feed;
  int32_t* counter;  // starts at 0
  Load load;
  int4 next_item;
  int item_index, next_index;
  sm90::RingCursor<ItemFeed::kSlots> cursor{0, 1};

  __device__ __forceinline__ ItemFeeder(const ItemFeed& feed_in, int32_t* counter_in,
                                        const Load& load_in)
      : feed(feed_in), counter(counter_in), load(load_in) {
    if (threadIdx.x == 0) fetch(blockIdx.x);
  }
  __device__ __forceinline__ void publish() {
    if (threadIdx.x != 0) return;
    sm90::barrier_wait(feed.empty(cursor.stage), cursor.parity);
    while (next_item.x == ItemFeed::kNotYet) {
      __nanosleep(100);
      next_item = load(item_index);
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(feed.base + cursor.stage * 16),
                 "r"(next_item.x), "r"(next_item.y), "r"(next_item.z), "r"(next_item.w)
                 : "memory");
    sm90::barrier_arrive(feed.full(cursor.stage));
    cursor.advance();
    fetch(next_index);
  }

 private:
  __device__ __forceinline__ void fetch(int index) {
    item_index = index;
    next_item = load(index);
    next_index = gridDim.x + atomicAdd(counter, 1);
  }
};

}  // namespace twell::tile_union
