// SPDX-License-Identifier: Apache-2.0
// Up projection of the tile-union execution, with the gate applied in the epilogue:
//   activations[tile] = gate[tile] * (x[tile tokens] w_up[union]^T),
// or the product alone, into a place of its own.
// Persistent. An item is 128 tokens by up to 192 neurons of one tile's union.
//   warpgroup 0     k-step by k-step, gathers rows of w_up, and has the copy engine read x: the
//                   tokens of a plain tile follow each other. Those that were set apart are read
//                   too, which is simpler than not to; their gate is zero here and their y is not
//                   stored. Rows of x for tiles of heavy rows are gathered.
//   warpgroups 1,2  64 tokens each: WGMMA, then h = g * u in shared memory, stored as an image
//   warpgroup 3     of gated layers: puts the gate's non-zeros, as find_unions has listed them, in
//                   their places of that image while the GEMM runs
#pragma once

#include "twell/ops/ffn/hopper/gate_places_sm90.cuh"
#include "twell/ops/ffn/hopper/gather_ring_sm90.cuh"
#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::tile_union::up {

inline constexpr int kStages = 4;
inline constexpr int kTileK = 64;
inline constexpr int kAccumulators = kMaxChunkBlocks * kBlock / 2;
inline constexpr uint32_t kBytesX = kTileTokens * kTileK * 2;
inline constexpr uint32_t kBytesW = kMaxChunkBlocks * kBlock * kTileK * 2;
inline constexpr uint32_t kStageBytes = kBytesX + kBytesW;
inline constexpr uint32_t kGateBytes = kMaxChunkBlocks * kBlockBytes;

// Column tiles of whose neurons a gate warpgroup holds the places at one time.
inline constexpr int kWindow = 128;
inline constexpr uint32_t kPlacesBytes = kWindow * 8 * 8;
// With barriers, and alignment to the swizzle atom.
inline constexpr uint32_t kSharedBytes = kStages * kStageBytes + kGateBytes + kPlacesBytes +
                                         ItemFeed::kBytes + 2 * kStages * 8 + 16 + 1024;

// With a warpgroup for the gate: 256 * 168 + 256 * 88 = 65,536 registers.
template <bool Gated>
inline constexpr int kCtaThreads = Gated ? kThreads + kTileTokens : kThreads;
template <bool Gated>
inline constexpr int kRegisters = Gated ? 168 : kConsumerRegisters;

struct Shared {
  uint32_t ring, gate, places, feed, full, empty, gate_full, gate_empty;
  __device__ explicit Shared(void* base) {
    ring = (sm90::smem_address(base) + 1023) & ~1023u;
    gate = ring + kStages * kStageBytes;
    places = gate + kGateBytes;
    feed = places + kPlacesBytes;
    full = feed + ItemFeed::kBytes;
    empty = full + kStages * 8;
    gate_full = empty + kStages * 8;
    gate_empty = gate_full + 8;
  }
};

struct Item {
  int tile, first_block, blocks, neurons;
  bool plain;
  int first;  // position in the tile's union
  // {tile, first block, blocks | plain << 8 | the same within the tile << 16, neurons of the tile's
  // union from there on}
  template <bool Gated>
  __device__ static int4 load(const Up& gemm, int index) {
    const Tiles& tiles = gemm.tiles;
    constexpr int4 kEnd{-1, 0, 0, 0};
    int2 item;
    int plain_tiles;
    if constexpr (Gated) {  // find_unions adds items as it goes along
      if (index >= tiles.max_up_items) return kEnd;
      item = sm90::load_acquire(tiles.up_items + index);
      if (item.y == 0) {
        const bool complete = sm90::load_acquire(&tiles.counts->complete) != 0;
        item = sm90::load_acquire(tiles.up_items + index);
        if (item.y == 0) return complete ? kEnd : int4{ItemFeed::kNotYet, 0, 0, 0};
      }
      plain_tiles = (gemm.gate.rows + kTileTokens - 1) / kTileTokens;
    } else {
      if (index >= tiles.counts->up_items) return kEnd;
      item = tiles.up_items[index];
      plain_tiles = tiles.counts->plain_tiles;
    }
    const int plain = item.x < plain_tiles;
    const int first = item.y & 0xffff;
    return int4{item.x, tiles.first_block[item.x] + first, item.y >> 16 | plain << 8 | first << 16,
                tiles.union_size[item.x] - first * kBlock};
  }
  __device__ explicit Item(int4 item)
      : tile(item.x),
        first_block(item.y),
        blocks(item.z & 0xff),
        neurons(item.w),
        plain((item.z >> 8 & 1) != 0),
        first((item.z >> 16) * kBlock) {}
  __device__ uint8_t* blocks_of(__nv_bfloat16* image) const {
    return reinterpret_cast<uint8_t*>(image) + int64_t{first_block} * kBlockBytes;
  }
};

// Rows p / 8 + 16 i of the stage's operands, 16-byte piece p % 8 of each: what producer p gathers.
struct GatherRows {
  static constexpr uint32_t kNone = ~0u;
  uint32_t x[kTileTokens / 16];  // first 16-byte piece of the row, or kNone
  uint32_t w[kMaxChunkBlocks * kBlock / 16];

  __device__ __forceinline__ GatherRows(const Up& gemm, const Item& item) {
    const int p = threadIdx.x % kProducers;
    const int pieces = gemm.width / 8;
    const int32_t* tokens = gemm.tiles.tokens + item.tile * kTileTokens;
    const int32_t* ids = gemm.tiles.union_ids + int64_t{item.first_block} * kBlock;
#pragma unroll
    for (int i = 0; i < kTileTokens / 16; ++i) {
      const int token = item.plain ? -1 : tokens[p / 8 + 16 * i];
      x[i] = token < 0 ? kNone : static_cast<uint32_t>(token) * pieces + p % 8;
    }
#pragma unroll
    for (int i = 0; i < kMaxChunkBlocks * kBlock / 16; ++i) {
      const int position = p / 8 + 16 * i;
      w[i] =
          position < item.neurons ? static_cast<uint32_t>(ids[position]) * pieces + p % 8 : kNone;
    }
  }
};

__device__ __forceinline__ void gather_step(const Up& gemm, const GatherRows& rows,
                                            const Item& item, uint32_t stage, int k) {
  const int p = threadIdx.x % kProducers;
  const bool inside = k * kTileK + p % 8 * 8 < gemm.width;
  const uint32_t piece = k * (kTileK / 8);
  const uint32_t dst = stage + p / 8 * 128 + ((p % 8) ^ (p / 8 % 8)) * 16;
  const auto* x = reinterpret_cast<const uint4*>(gemm.x) + piece;
  const auto* w = reinterpret_cast<const uint4*>(gemm.weight) + piece;
  if (!item.plain) {
#pragma unroll
    for (int i = 0; i < kTileTokens / 16; ++i) {
      const bool valid = inside && rows.x[i] != GatherRows::kNone;
      sm90::gather16(dst + i * 2048, x + (valid ? rows.x[i] : 0), valid);
    }
  }
#pragma unroll
  for (int block = 0; block < kMaxChunkBlocks; ++block) {
    if (block >= item.blocks) break;
#pragma unroll
    for (int j = 0; j < kBlock / 16; ++j) {
      const int i = block * (kBlock / 16) + j;
      const bool valid = inside && rows.w[i] != GatherRows::kNone;
      sm90::gather16(dst + kBytesX + i * 2048, w + (valid ? rows.w[i] : 0), valid);
    }
  }
}

template <bool Gated>
__device__ __forceinline__ void produce(const Up& gemm, const Shared& shared) {
  using namespace sm90;
  GatherRing<kStages> ring{shared.full, shared.empty};
  const int k_steps = (gemm.width + kTileK - 1) / kTileK;
  ItemFeed feed{shared.feed};
  ItemFeeder feeder(feed, gemm.taken, [&](int index) { return Item::load<Gated>(gemm, index); });
  for (;;) {
    feeder.publish();
    __syncwarp();  // without it the warp gathers in two halves, several times slower
    const Item item(feed.take());
    if (item.tile < 0) break;
    const GatherRows rows(gemm, item);
    for (int k = 0; k < k_steps; ++k) {
      const int index_of_stage = ring.acquire();
      const uint32_t stage = shared.ring + index_of_stage * kStageBytes;
      if (item.plain && threadIdx.x == 0) {
        const uint32_t landed = shared.full + index_of_stage * 8;
        barrier_expect(landed, kBytesX);
        tensor_load(stage, &gemm.map_x, k * kTileK, item.tile * kTileTokens, landed);
      }
      gather_step(gemm, rows, item, stage, k);
      ring.commit();
    }
  }
}

// The warpgroup that puts the gate into its places, item after item.
__device__ __forceinline__ void place_gates(const Up& gemm, const Shared& shared) {
  constexpr int kPlacers = kTileTokens, kBarrier = 3;
  const Gate& gate = gemm.gate;
  const Tiles& tiles = gemm.tiles;
  const int thread = threadIdx.x % kPlacers, warp = thread / 32;
  ItemFeed feed{shared.feed};
  for (uint32_t parity = 1;; parity ^= 1) {
    const Item item(feed.take());
    if (item.tile < 0) break;
    const int count = min(item.neurons, item.blocks * kBlock);
    const int32_t* ids = tiles.union_ids + int64_t{item.first_block} * kBlock;
    const int low = ids[0], high = ids[count - 1];
    const int token = tiles.tokens[item.tile * kTileTokens + thread];
    const GatePlaces places{item.first, count, shared.gate, shared.places};
    const int64_t first_column_tile = int64_t{item.tile} * gate.col_tiles;
#pragma unroll 1
    for (int window = low / 256; window <= high / 256; window += kWindow) {
      const int end = min(window + kWindow, high / 256 + 1);
      sm90::named_barrier(kBarrier, kPlacers);  // nobody reads the window before
      for (int i = thread; i < (end - window) * 8; i += kPlacers) {
        const int64_t at = (first_column_tile + window) * 8 + i;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared.places + i * 8),
                     "r"(tiles.mask[at]), "r"(tiles.before[at])
                     : "memory");
      }
      const int32_t* listed = tiles.listed + first_column_tile;
      if (window == low / 256) {
        sm90::barrier_wait(shared.gate_empty, parity);  // the previous item's result is stored
        places.clear(item.blocks, thread);
      }
      sm90::named_barrier(kBarrier, kPlacers);
#pragma unroll 1
      for (int t = window + warp; t < end; t += kPlacers / 32) {
        const int64_t at = first_column_tile + t;
        const int entries = tiles.listed[at];
        if (entries > kListed) continue;
        places.put_listed(tiles.entries + at * kListed, entries, (t - window) * 8);
      }
      // What was too much to be listed.
#pragma unroll 1
      for (int t = window; t < end; ++t) {
        if (token < 0 || listed[t] <= kListed) continue;
        const auto* source = reinterpret_cast<const uint4*>(
            gate.words + (int64_t{token} * gate.col_tiles + t) * gate.slots);
        const uint4 head = source[0];
        if (static_cast<int>(head.x) < gate.slots) {
          places.put_packed(source, static_cast<int>(head.x), (t - window) * 8, thread);
        } else {
          places.put_spilled(gate.spill + int64_t{head.y} * 32, (t - window) * 8,
                             max(low - t * 256, 0), min(high + 1 - t * 256, 256), thread);
        }
      }
    }
    sm90::barrier_arrive(shared.gate_full);
  }
}

// k-step of an item at which the last item's stores have long been complete.
inline constexpr int kTellStep = 4;

// State of a consumer across items.
template <bool Gated>
struct Consumer {
  const Up& gemm;
  const Shared& shared;
  const int warpgroup = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  StageReader<kStages> ring{shared.full, shared.empty};
  uint32_t gate_parity = 0;
  bool storing = false;
  int stored_tile = -1, stored_blocks = 0;  // not told of yet

  // Every thread hands back what it wrote: racecheck does not see that one could for all, behind
  // the warpgroup's barrier.
  __device__ __forceinline__ void finish_store() {
    if (storing) {
      if (thread == 0) sm90::bulk_store_wait_read();
      if (Gated) sm90::barrier_arrive(shared.gate_empty);
    }
    storing = false;
  }

  // Tells down of the blocks stored last.
  __device__ __forceinline__ void tell() {
    if (Gated && stored_tile >= 0 && thread == 0 && gemm.tiles.ready != nullptr) {
      sm90::bulk_store_wait();
      sm90::add_release(gemm.tiles.ready + stored_tile, stored_blocks);
    }
    stored_tile = -1;
  }

  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[kAccumulators], int k_steps) {
    using namespace sm90;
    int previous = 0;
    for (int k = 0; k < k_steps; ++k) {
      const int current = ring.wait();
      const uint32_t stage = shared.ring + current * kStageBytes;
      const uint64_t a = k_major_operand(stage + warpgroup * (kBytesX / 2));
      const uint64_t b = k_major_operand(stage + kBytesX);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        wgmma<N, false>(acc, a + i * 2, b + i * 2, k > 0 || i > 0);
      }
      wgmma_commit();
      if (k == 0) {
        finish_store();
      } else {
        wgmma_wait<1>();
        ring.release(previous);
        if (k == kTellStep) tell();
      }
      previous = current;
      ring.advance();
    }
    wgmma_wait<0>();
    ring.release(previous);
    tell();  // where there were fewer steps
  }

  // h = g * u, in f32, rounded once; or u.
  template <int N>
  __device__ __forceinline__ void write_result(const float (&acc)[kAccumulators]) {
    const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const uint32_t base = shared.gate + row * 128 + thread % 4 * 4;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint32_t at = base + i / 8 * kBlockBytes + ((i % 8) ^ (row % 8)) * 16;
      write_pair(at, acc[4 * i], acc[4 * i + 1]);
      write_pair(at + 8 * 128, acc[4 * i + 2], acc[4 * i + 3]);
    }
  }
  __device__ __forceinline__ static void write_pair(uint32_t at, float low, float high) {
    uint32_t pair;
    if (Gated) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(at));
      low *= sm90::low_half(pair);
      high *= sm90::high_half(pair);
    }
    pair = sm90::bf16x2(low, high);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
  }

  template <int N>
  __device__ __forceinline__ void run(float (&acc)[kAccumulators], const Item& item, int k_steps) {
    using namespace sm90;
    multiply<N>(acc, k_steps);
    if (Gated) {
      barrier_wait(shared.gate_full, gate_parity);
      gate_parity ^= 1;
    } else {
      named_barrier(1 + warpgroup, 128);  // this warpgroup's last store has been read
    }
    write_result<N>(acc);
    fence_async_shared();
    named_barrier(1 + warpgroup, 128);
    if (thread == 0) {
      const uint32_t half = warpgroup * (kBlockBytes / 2);
      uint8_t* out = item.blocks_of(Gated ? gemm.tiles.activations : gemm.product) + half;
      for (int block = 0; block < N / kBlock; ++block) {
        bulk_store(out + block * kBlockBytes, shared.gate + half + block * kBlockBytes,
                   kBlockBytes / 2);
      }
      bulk_store_commit();
    }
    storing = true;
    stored_tile = item.tile;
    stored_blocks = item.blocks;
  }
};

template <bool Gated>
__device__ __forceinline__ void consume(const Up& gemm, const Shared& shared) {
  Consumer<Gated> consumer{gemm, shared};
  const int k_steps = (gemm.width + kTileK - 1) / kTileK;
  ItemFeed feed{shared.feed};
  float acc[kAccumulators];
  for (;;) {
    const Item item(feed.take());
    if (item.tile < 0) break;
    switch (item.blocks) {
      case 1:
        consumer.template run<64>(acc, item, k_steps);
        break;
      case 2:
        consumer.template run<128>(acc, item, k_steps);
        break;
      default:
        consumer.template run<192>(acc, item, k_steps);
        break;
    }
  }
  consumer.tell();
  if (consumer.thread == 0) sm90::bulk_store_wait();
}

template <bool Gated>
__global__ void __launch_bounds__(kCtaThreads<Gated>, 1)
    tile_union_up_sm90_kernel(const __grid_constant__ Up gemm) {
  extern __shared__ uint8_t memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    init_ring(shared.full, shared.empty, kStages);
    ItemFeed{shared.feed}.init(kCtaThreads<Gated>);
    sm90::barrier_init(shared.gate_full, kTileTokens);
    sm90::barrier_init(shared.gate_empty, kConsumerWarpgroups * 128);
    sm90::fence_barrier_init();
    sm90::prefetch_tensor_map(&gemm.map_x);
  }
  __syncthreads();
  if constexpr (!Gated) sm90::wait_for_previous_kernel();
  sm90::allow_next_kernel();
  if (gemm.condition != nullptr && *gemm.condition == 0) return;
  if (threadIdx.x < kProducers) {
    sm90::registers_decrease<kProducerRegisters>();
    produce<Gated>(gemm, shared);
  } else if (threadIdx.x < kThreads) {
    sm90::registers_increase<kRegisters<Gated>>();
    consume<Gated>(gemm, shared);
  } else {
    sm90::registers_decrease<kProducerRegisters>();
    place_gates(gemm, shared);
  }
  // What comes next relies on the kernel in front being over too.
  if constexpr (Gated) sm90::wait_for_previous_kernel();
}

}  // namespace twell::tile_union::up
