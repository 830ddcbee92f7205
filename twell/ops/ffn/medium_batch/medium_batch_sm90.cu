// SPDX-License-Identifier: Apache-2.0
// Feed-forward layer for a few tiles of 128 tokens, as three kernels.
//
// 1. gate: a CTA computes the gate of a segment of up to 192 neurons for a tile, and writes the
// values of those active for any of its tokens. CTAs of a cluster share a tile of tokens or a
// segment, which is loaded once, by multicast.
//
// 2. up: the active neurons of all segments form the union of the tile. A cluster computes h for up
// to 192 of them; its CTAs divide the width, and add up their sums through distributed shared
// memory. So x is read a few times only, however few neurons a CTA has.
//
// 3. down: y = h w_down. The CTAs of a cluster divide the union, and add up their sums likewise.
//
// In all three, warpgroup 0 fills a ring buffer, with TMA and by gathering weight rows, and
// warpgroups 1 and 2 multiply 64 tokens each with WGMMA.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/store_matrices.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/medium_batch/medium_batch_cuda.h"
#include "twell/ops/ffn/medium_batch/medium_batch_schedule.h"

namespace twell {
namespace medium_batch {
namespace {

using namespace gpu;

constexpr int kTokens = 128;  // of a tile: two warpgroups of 64 rows
constexpr int kGroup = 16;    // neurons: the k of one WGMMA
constexpr int kGroupBytes = kTokens * kGroup * 2;
constexpr int kThreads = 384;
constexpr int kProducers = 128;  // threads of warpgroup 0, which loads
constexpr int kConsumers = 256;  // of warpgroups 1 and 2, which multiply

// What the kernels pass on. A tile has F rounded up to 16 places for neurons.
struct Lists {
  // The gate kernel writes these; the active neurons of a segment begin at place segment * neurons.
  __nv_bfloat16* gate;  // [tiles, places, 128 tokens]
  int32_t* ids;         // [tiles, places] neurons
  int32_t* counts;      // [tiles, segments] active neurons
  // The up kernel writes these, for the union of all segments, without gaps.
  uint8_t* h;          // [tiles, places / 16] of [128 tokens, 16 neurons] with the 32-byte swizzle
  int32_t* union_ids;  // [tiles, places] neurons, then -1 up to a multiple of 16
  int32_t* totals;     // [tiles] neurons
  int places;
  int segments;
  int neurons;  // of a segment
};

// Position in a ring buffer of a number of stages known at run time. The parity flips with every
// round.
struct Cursor {
  int stages;
  uint32_t parity;
  int stage = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Each CTA runs a loop for tens of k-steps at most, so fetching instructions takes a good part of
// its time. So loops are not unrolled, and nothing that is the same in every step is computed in
// them.
constexpr int kTileK = 64;
constexpr int kMaxNeurons = 192;  // of a CTA of gate, or of a cluster of up, at a time
constexpr int kMaxStages = 8;
constexpr int kAccumulators = kMaxNeurons / 2;
constexpr uint32_t kBytesX = kTokens * kTileK * 2;
constexpr uint32_t kSharedBytes = 232448;  // 227 KiB, the most a CTA can have

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Calls multiply.operator()<N>() for the least N that is not less than `neurons`, of those for
// which wgmma is written out.
template <typename Multiply>
__device__ __forceinline__ void for_width(int neurons, const Multiply& multiply) {
  if (neurons <= 32) {
    multiply.template operator()<32>();
  } else if (neurons <= 48) {
    multiply.template operator()<48>();
  } else if (neurons <= 64) {
    multiply.template operator()<64>();
  } else if (neurons <= 80) {
    multiply.template operator()<80>();
  } else if (neurons <= 96) {
    multiply.template operator()<96>();
  } else if (neurons <= 128) {
    multiply.template operator()<128>();
  } else if (neurons <= 160) {
    multiply.template operator()<160>();
  } else if (neurons <= 176) {
    multiply.template operator()<176>();
  } else {
    multiply.template operator()<192>();
  }
}

// One k-step of 64 tokens by N neurons; x and the weight stand one after the other in the stage.
template <int N>
__device__ __forceinline__ void multiply_step(float (&acc)[kAccumulators], uint32_t stage,
                                              int warpgroup, bool accumulate) {
  const uint64_t a = k_major_operand(stage + warpgroup * (kBytesX / 2));
  const uint64_t b = k_major_operand(stage + kBytesX);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    wgmma<N, false>(acc, a + i * 2, b + i * 2, accumulate || i > 0);
  }
  wgmma_commit();
}

namespace gate {

constexpr uint32_t kCountBytes = 2 * 8 * 4;  // of 8 warps: masks of active neurons, non-zeros
constexpr uint32_t kRingBytes =
    (kSharedBytes - 1024 - 2 * kMaxStages * 8 - kCountBytes) / 1024 * 1024;
// The finished tile, in the ring buffer's memory: a row of 128 tokens per neuron. The pitch keeps
// the 16-byte pieces that a warp stores or loads at a time in different banks.
constexpr uint32_t kRowBytes = kTokens * 2 + 16;
static_assert(kMaxNeurons * kRowBytes <= kRingBytes);

// One operand: boxes of so many rows that the CTAs of a cluster that read the same rows load one
// each. Boxes of the last rows are lower, because TMA takes long for rows outside of the matrix.
struct Boxes {
  CUtensorMap map, last_map;
  int rows, last_rows;
};

struct Params {
  Boxes x, weight;          // [M, D], the first weight [F, D]
  const __nv_bfloat16* up;  // [F, D] rows of active neurons are prefetched into the L2; or null
  Lists lists;
  ActivityCuda* activity;  // or null
  bool counts_unions;
  int tokens, width, ffn, tiles;
  int k_steps;  // ceil(D / kTileK)
  int stages;
  int cluster_x, cluster_y;  // CTAs of a cluster along the tokens, along the neurons
  bool early_weights;        // the first weight may be read before the predecessor has finished
  uint32_t cut;              // of FATReLU
};

// With more than the CTA was launched with, 168 per thread, the kernel would wait for ever.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducers * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * 168);

struct Shared {
  uint32_t ring, full, empty, masks, nonzeros;
  uint32_t stage_bytes;
  __device__ Shared(void* base, int neurons) {
    ring = (smem_address(base) + 1023) & ~1023u;
    full = ring + kRingBytes;
    empty = full + kMaxStages * 8;
    masks = empty + kMaxStages * 8;
    nonzeros = masks + 8 * 4;
    stage_bytes = kBytesX + static_cast<uint32_t>(neurons) * 128;
  }
  __device__ __forceinline__ uint32_t stage(int index) const { return ring + index * stage_bytes; }
};

struct Cta {
  const Params& params;
  const Shared& shared;
  const int tile = static_cast<int>(blockIdx.x), segment = static_cast<int>(blockIdx.y);
  // Within the cluster, which has one or two CTAs each way.
  const int x = tile & (params.cluster_x - 1), y = segment & (params.cluster_y - 1);
  const int first = segment * params.lists.neurons;
  // A cluster may reach past the last segment.
  __device__ __forceinline__ bool outside() const { return segment >= params.lists.segments; }
};

// The boxes of one operand that a CTA loads.
struct Loads {
  const CUtensorMap* map;
  int row;          // of the matrix
  uint32_t offset;  // of the box in the stage
  uint32_t bytes;   // of all boxes that land in this CTA
  uint16_t mask;    // of the CTAs that read it
  bool shared;      // by several CTAs

  // `index` of the `count` CTAs that read rows from `first` on.
  __device__ __forceinline__ Loads(const Boxes& boxes, bool last, bool none, int first, int index,
                                   int count, uint32_t readers) {
    const int rows = last ? boxes.last_rows : boxes.rows;
    map = last ? &boxes.last_map : &boxes.map;
    row = first + index * rows;
    offset = static_cast<uint32_t>(index * rows * 128);
    bytes = none ? 0 : static_cast<uint32_t>(count * rows * 128);
    mask = static_cast<uint16_t>(readers);
    shared = count > 1;
  }
  __device__ __forceinline__ void load(uint32_t to, int k, uint32_t landed) const {
    if (bytes == 0) return;
    if (shared) {
      tensor_load_multicast(to + offset, map, k * kTileK, row, landed, mask);
    } else {
      tensor_load(to + offset, map, k * kTileK, row, landed);
    }
  }
};

// Run by the thread that fills the ring buffers of its cluster. A k-step has few cycles, so all
// that is the same in each is computed before.
__device__ __forceinline__ void produce(const Cta& cta) {
  const Params& p = cta.params;
  const Shared& s = cta.shared;
  const int x = cta.x, y = cta.y;
  // CTAs of a tile stand cluster_x apart, those of a segment side by side.
  const uint32_t column = p.cluster_y == 1 ? 1 : 1 | 1 << p.cluster_x;
  const Loads tokens(p.x, cta.tile == p.tiles - 1, false, cta.tile * kTokens, y, p.cluster_y,
                     column << x);
  const Loads neurons(p.weight, cta.segment == p.lists.segments - 1, cta.outside(), cta.first, x,
                      p.cluster_x, ((1u << p.cluster_x) - 1) << (y * p.cluster_x));
  const uint32_t bytes = tokens.bytes + neurons.bytes;
  const auto load_weight = [&](int stage, int k) {
    barrier_arrive_expect(s.full + stage * 8, bytes);
    neurons.load(s.stage(stage) + kBytesX, k, s.full + stage * 8);
  };
  const int early = p.early_weights ? min(p.stages, p.k_steps) : 0;
#pragma unroll 1
  for (int k = 0; k < early; ++k) load_weight(k, k);
  wait_for_previous_kernel();
  // Trigger dependents only after griddepcontrol.wait; earlier would delay our own wait.
  allow_next_kernel();
  Cursor cursor{p.stages, 1};  // a new ring buffer is empty
#pragma unroll 1
  for (int k = 0; k < p.k_steps; ++k, cursor.advance()) {
    if (k >= early) {
      barrier_wait(s.empty + cursor.stage * 8, cursor.parity);
      load_weight(cursor.stage, k);
    }
    tokens.load(s.stage(cursor.stage), k, s.full + cursor.stage * 8);
  }
}

struct Consumer {
  const Cta& cta;
  const Params& p = cta.params;
  const Shared& s = cta.shared;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  // The CTAs that load what this one reads, which are those that read what this one loads: of the
  // same tile, and of the same segment. Thread i of a warpgroup tells the i-th.
  const int readers = p.cluster_x + p.cluster_y - 1;
  const int reader =
      thread < p.cluster_y
          ? cta.x + thread * p.cluster_x
          : (thread - p.cluster_y + (thread - p.cluster_y >= cta.x ? 1 : 0)) + cta.y * p.cluster_x;

  __device__ __forceinline__ void release(int stage) const {
    if (thread < readers) {
      barrier_arrive_cluster(s.empty + stage * 8, static_cast<uint32_t>(reader));
    }
  }

  // acc = x w^T for N neurons.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[kAccumulators]) const {
    Cursor cursor{p.stages, 0};
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < p.k_steps; ++k) {
      barrier_wait(s.full + cursor.stage * 8, cursor.parity);
      multiply_step<N>(acc, s.stage(cursor.stage), warpgroup, k > 0);
      if (k > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = cursor.stage;
      cursor.advance();
    }
    wgmma_wait<0>();
    release(previous);
  }

  // The gate in bf16, into the tile in shared memory. Rows of the ring buffer that were not loaded
  // are stale, so tokens past the last are set to 0, and neurons past the last are not read.
  __device__ __forceinline__ void store_tile(const float (&acc)[kAccumulators]) const {
    const int row = warpgroup * 64 + thread / 32 * 16;
    const bool upper_in = cta.tile * kTokens + row + lane / 4 < p.tokens;
    const bool lower_in = cta.tile * kTokens + row + lane / 4 + 8 < p.tokens;
    const uint32_t to = s.ring + (lane / 16 * 8 + lane % 8) * kRowBytes +
                        static_cast<uint32_t>(row + lane / 8 % 2 * 8) * 2;
    const auto pair = [&](bool in, float low, float high) {
      return in ? above(relu_bf16x2(low, high), p.cut) : 0;
    };
#pragma unroll
    for (int i = 0; i < kMaxNeurons / 8; i += 2) {
      if (8 * i >= p.lists.neurons) break;
      store_matrices_transposed(to + i * 8 * kRowBytes, pair(upper_in, acc[4 * i], acc[4 * i + 1]),
                                pair(lower_in, acc[4 * i + 2], acc[4 * i + 3]),
                                pair(upper_in, acc[4 * i + 4], acc[4 * i + 5]),
                                pair(lower_in, acc[4 * i + 6], acc[4 * i + 7]));
    }
  }

  // Writes the active neurons of the tile and their gate, and counts. A thread has a neuron.
  __device__ __forceinline__ void publish() const {
    const int index = warpgroup * 128 + thread, warp = index / 32;
    const uint32_t row = s.ring + index * kRowBytes;
    uint32_t halves = 0;
    if (index < min(p.lists.neurons, p.ffn - cta.first)) {
#pragma unroll 4
      for (int i = 0; i < kTokens / 8; ++i) {
        const uint4 v = load_shared16(row + i * 16);
        for (const uint32_t pair : {v.x, v.y, v.z, v.w}) halves += __vminu2(pair, 0x00010001u);
      }
    }
    const auto nonzeros = static_cast<int>((halves & 0xffff) + (halves >> 16));
    const uint32_t mask = __ballot_sync(~0u, nonzeros > 0);
    const int of_warp = __reduce_add_sync(~0u, nonzeros);
    if (lane == 0) {
      store_shared(s.masks + warp * 4, mask);
      store_shared(s.nonzeros + warp * 4, of_warp);
    }
    named_barrier(1, kConsumers);
    int before = __popc(mask & ((1u << lane) - 1)), total = 0, nnz = 0;
#pragma unroll
    for (int i = 0; i < kConsumers / 32; ++i) {
      const int count = __popc(load_shared4(s.masks + i * 4));
      before += i < warp ? count : 0;
      total += count;
      nnz += static_cast<int>(load_shared4(s.nonzeros + i * 4));
    }
    wait_for_previous_kernel();  // the predecessor may still read the lists
    const int64_t place = int64_t{cta.tile} * p.lists.places + cta.first + before;
    if (nonzeros > 0) {
      const int neuron = cta.first + index;
      bulk_store(p.lists.gate + place * kTokens, row, kTokens * 2);
      bulk_store_commit();
      p.lists.ids[place] = neuron;
      if (p.up != nullptr) bulk_prefetch(p.up + int64_t{neuron} * p.width, p.width * 2);
    }
    if (index == 0 && !cta.outside()) {
      p.lists.counts[int64_t{cta.tile} * p.lists.segments + cta.segment] = total;
      if (p.activity != nullptr) {
        atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(nnz));
        if (p.counts_unions) {
          atomicAdd(&p.activity->union_neurons, static_cast<unsigned long long>(total));
        }
        if (cta.segment == 0) {
          if (p.counts_unions) atomicAdd(&p.activity->unions, 1ull);
          atomicAdd(&p.activity->tokens,
                    static_cast<unsigned long long>(min(kTokens, p.tokens - cta.tile * kTokens)));
        }
      }
    }
    bulk_store_wait();
  }

  __device__ __forceinline__ void run() const {
    float acc[kAccumulators];
    for_width(p.lists.neurons, [&]<int N>() { multiply<N>(acc); });
    named_barrier(1, kConsumers);  // nothing reads the ring buffer any more
    store_tile(acc);
    fence_async_shared();  // bulk stores read it
    named_barrier(1, kConsumers);
    publish();
  }
};

// Grid: [tiles, segments], each rounded up to whole clusters.
__global__ void __launch_bounds__(kThreads, 1)
    medium_gate_sm90_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t memory[];
  const Shared shared(memory, params.lists.neurons);
  const Cta cta{params, shared};
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(shared.full + i * 8, 1);
      barrier_init(shared.empty + i * 8, 2 * (params.cluster_x + params.cluster_y - 1));
    }
    fence_barrier_init();
  }
  __syncthreads();
  cluster_arrive_relaxed();
  cluster_wait();
  if (threadIdx.x < kProducers) {
    registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) produce(cta);
    __syncwarp();
  } else {
    registers_increase<kConsumerRegisters>();
    Consumer{cta}.run();
    __syncwarp();
  }
  // No CTA leaves while another may still signal its barriers.
  cluster_arrive_relaxed();
  cluster_wait();
}

}  // namespace gate

namespace up {

constexpr uint32_t kPlaceBytes = kMaxNeurons * 4;
// For the scan of a union. Static memory would be padded to the widest alignment of dynamic memory
// in the source's unit.
constexpr uint32_t kScanBytes = 32 * 4;
// 1,024 bytes align it to the swizzle atom.
constexpr uint32_t kRingBytes =
    (kSharedBytes - 1024 - kPlaceBytes - 2 * kMaxStages * 8 - kScanBytes) / 1024 * 1024;

struct Params {
  CUtensorMap map_x;          // [M, D], boxes of 128 rows
  const __nv_bfloat16* up;    // [F, D], null without a gate
  const __nv_bfloat16* down;  // [F, D] rows of active neurons are prefetched into the L2
  Lists lists;
  int width, k_steps;
  bool squared;  // f(g) = g^2
  bool up_relu;  // dReLU
};

struct Shared {
  uint32_t ring, places, full, empty;
  __device__ explicit Shared(void* base) {
    ring = (smem_address(base) + 1023) & ~1023u;
    places = ring + kRingBytes;  // of the neurons in Lists::gate; -1 past the last
    full = places + kPlaceBytes;
    empty = full + kMaxStages * 8;
  }
};

// Neurons [first, first + size) of a tile's union, which a cluster computes at a time; size is a
// multiple of 16. Stages have room for `most` neurons.
struct Chunk {
  const Params& p;
  const Shared& s;
  int tile, first, size, most;
  int k_begin, k_end;  // k-steps of this CTA

  __device__ __forceinline__ uint32_t stage(int index) const {
    return s.ring + index * (kBytesX + most * 128);
  }

  // Warpgroup 0. Thread t gathers piece t % 8 of rows t / 8 + 16 i.
  __device__ __forceinline__ void produce(Cursor& cursor) const {
    const int thread = static_cast<int>(threadIdx.x), pieces = p.width / 8;
    constexpr uint32_t kNone = ~0u;
    uint32_t rows[kMaxNeurons / 16];
    const int32_t* ids = p.lists.ids + int64_t{tile} * p.lists.places;
#pragma unroll
    for (int i = 0; i < kMaxNeurons / 16; ++i) {
      rows[i] = kNone;
      if (16 * i >= size) continue;
      const auto place = static_cast<int>(load_shared4(s.places + (thread / 8 + 16 * i) * 4));
      if (place >= 0) rows[i] = static_cast<uint32_t>(ids[place]) * pieces + thread % 8;
    }
    const auto* weight = reinterpret_cast<const uint4*>(p.up);
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k, cursor.advance()) {
      barrier_wait(s.empty + cursor.stage * 8, cursor.parity);
      const uint32_t landed = s.full + cursor.stage * 8;
      if (thread == 0) {
        barrier_expect(landed, kBytesX);
        tensor_load(stage(cursor.stage), &p.map_x, k * kTileK, tile * kTokens, landed);
      }
      __syncwarp();  // without it the warp gathers in two halves, several times slower
      const bool inside = k * kTileK + thread % 8 * 8 < p.width;
      const uint32_t to =
          stage(cursor.stage) + kBytesX + thread / 8 * 128 + ((thread % 8) ^ (thread / 8 % 8)) * 16;
      const uint4* from = weight + k * (kTileK / 8);
#pragma unroll
      for (int i = 0; i < kMaxNeurons / 16; ++i) {
        // Rows past the last neuron keep stale values, which only reach columns that are not used.
        if (rows[i] != kNone) gather16(to + i * 2048, from + (inside ? rows[i] : 0), inside);
      }
      gather_arrive(landed);
    }
  }

  // Warpgroups 1 and 2.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[kAccumulators], Cursor& cursor) const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
    const bool releases = threadIdx.x % 128 == 0;
    int previous = 0;
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k) {
      barrier_wait(s.full + cursor.stage * 8, cursor.parity);
      // Gathers write through the generic proxy, WGMMA reads through the async proxy.
      fence_async_shared();
      multiply_step<N>(acc, stage(cursor.stage), warpgroup, k > k_begin);
      if (k > k_begin) {
        wgmma_wait<1>();
        if (releases) barrier_arrive(s.empty + previous * 8);
      }
      previous = cursor.stage;
      cursor.advance();
    }
    wgmma_wait<0>();
    if (releases && k_end > k_begin) barrier_arrive(s.empty + previous * 8);
  }

  // Sends a block of 8 neurons to the CTA that adds it up: in the ring buffer's memory, [block of
  // that CTA][from CTA][thread] float4.
  __device__ __forceinline__ void send(const float (&acc)[kAccumulators], int log_split,
                                       int rank) const {
    const int thread = static_cast<int>(threadIdx.x) - kProducers;
    const bool empty = k_end == k_begin;
#pragma unroll
    for (int i = 0; i < kMaxNeurons / 8; ++i) {
      if (8 * i >= size) break;
      const int to_rank = i & ((1 << log_split) - 1), part = i - to_rank + rank;
      const uint32_t to = remote_address(s.ring + (part * kConsumers + thread) * 16,
                                         static_cast<uint32_t>(to_rank));
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "f"(empty ? 0.0f : acc[4 * i]), "f"(empty ? 0.0f : acc[4 * i + 1]),
                   "f"(empty ? 0.0f : acc[4 * i + 2]), "f"(empty ? 0.0f : acc[4 * i + 3])
                   : "memory");
    }
  }

  // The gate of a thread's values of a block of 8 neurons: of two neurons in each half, {of its
  // row, of the row 8 below}. 0 past the last neuron.
  __device__ __forceinline__ uint2 load_gate(int block) const {
    const int thread = static_cast<int>(threadIdx.x) - kProducers;
    const int row = thread / 32 * 16 + thread % 32 / 4, first_place = 8 * block + 2 * (thread % 4);
    const uint16_t* gate = reinterpret_cast<const uint16_t*>(p.lists.gate) +
                           int64_t{tile} * p.lists.places * kTokens + row;
    uint2 pairs{};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto place = static_cast<int>(load_shared4(s.places + (first_place + c) * 4));
      if (place < 0) continue;
      pairs.x |= static_cast<uint32_t>(gate[int64_t{place} * kTokens]) << (16 * c);
      pairs.y |= static_cast<uint32_t>(gate[int64_t{place} * kTokens + 8]) << (16 * c);
    }
    return pairs;
  }

  // Adds up this CTA's blocks in the order of the CTAs, and writes h.
  __device__ __forceinline__ void write(int log_split, int rank) const {
    const int split = 1 << log_split;
#pragma unroll 1
    for (int i = rank; 8 * i < size; i += split) write_block(i, load_gate(i), log_split);
  }
  __device__ __forceinline__ void write_block(int block, uint2 gate, int log_split) const {
    const int thread = static_cast<int>(threadIdx.x) - kProducers;
    const int row = thread / 32 * 16 + thread % 32 / 4, quad = thread % 4;
    uint8_t* to = p.lists.h + (int64_t{tile} * p.lists.places + first) / kGroup * kGroupBytes +
                  row * (kGroup * 2) + quad * 4;
    float4 u{};
    for (int from = 0; p.up != nullptr && from < 1 << log_split; ++from) {
      const int part = (block >> log_split << log_split) + from;
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                   : "r"(s.ring + (part * kConsumers + thread) * 16)
                   : "memory");
      u.x += v.x;
      u.y += v.y;
      u.z += v.z;
      u.w += v.w;
    }
    const auto h = [&](uint32_t g, float low, float high, int neuron) {
      if (p.up == nullptr) low = high = 1.0f;
      low = relu_if(p.up_relu, low);
      high = relu_if(p.up_relu, high);
      if (p.squared) {
        low *= low_half(g);
        high *= high_half(g);
      }
      // Columns past the last neuron were multiplied with stale shared memory, so they are dropped.
      const auto inside = [&](int of) {
        return static_cast<int>(load_shared4(s.places + of * 4)) >= 0;
      };
      return bf16x2(inside(neuron) ? low * low_half(g) : 0.0f,
                    inside(neuron + 1) ? high * high_half(g) : 0.0f);
    };
    const int neuron = 8 * block + 2 * quad, swap = row / 4 % 2;  // of row + 8 too
    to += block / 2 * kGroupBytes + ((block % 2) ^ swap) * 16;
    *reinterpret_cast<uint32_t*>(to) = h(gate.x, u.x, u.y, neuron);
    *reinterpret_cast<uint32_t*>(to + 8 * kGroup * 2) = h(gate.y, u.z, u.w, neuron);
  }
};

// Where the segments' neurons stand in the union: thread i has segment i.
struct Union {
  const Lists& lists;
  int tile;
  int count, before, total;  // of this thread's segment, of those before it, of all

  __device__ __forceinline__ Union(const Lists& lists_in, int tile_in, int* scratch)
      : lists(lists_in), tile(tile_in) {
    const int segment = static_cast<int>(threadIdx.x);
    count = segment < lists.segments ? lists.counts[int64_t{tile} * lists.segments + segment] : 0;
    before = block_scan<kThreads>(count, scratch, total);
  }
  // Writes the places of neurons [first, first + size) of the union.
  __device__ __forceinline__ void write_places(uint32_t places, int first, int size) const {
    const int index = static_cast<int>(threadIdx.x);
    if (index < size && first + index >= total) store_shared(places + index * 4, ~0u);
    const int from = max(first - before, 0), to = min(first + size - before, count);
    for (int i = from; i < to; ++i) {
      store_shared(places + (before + i - first) * 4, index * lists.neurons + i);
    }
  }
};

// Grid: [CTAs that divide the width, which form a cluster; clusters of a tile; tiles].
__global__ void __launch_bounds__(kThreads, 1)
    medium_up_sm90_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint8_t memory[];
  const Shared s(memory);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.map_x);
    for (int i = 0; i < kMaxStages; ++i) {
      barrier_init(s.full + i * 8, kProducers);
      barrier_init(s.empty + i * 8, 2);
    }
    fence_barrier_init();
  }
  // A power of two, because the compiler turns divisions into many instructions.
  const int split = static_cast<int>(gridDim.x), log_split = __ffs(split) - 1;
  const int rank = static_cast<int>(blockIdx.x);
  const int clusters = static_cast<int>(gridDim.y), cluster = static_cast<int>(blockIdx.y);
  const int tile = static_cast<int>(blockIdx.z);
  wait_for_previous_kernel();
  allow_next_kernel();
  const Union neurons(p.lists, tile, reinterpret_cast<int*>(memory + kSharedBytes - kScanBytes));
  if (threadIdx.x == 0 && rank == 0 && cluster == 0) p.lists.totals[tile] = neurons.total;
  const auto padded = [](int count) { return (count + kGroup - 1) / kGroup * kGroup; };
  const int most = min(padded((neurons.total + clusters - 1) / clusters), kMaxNeurons);
  const int stages = min(kMaxStages, static_cast<int>(kRingBytes / (kBytesX + most * 128)));
  Chunk chunk{
      p, s, tile, 0, 0, most, p.k_steps * rank >> log_split, p.k_steps * (rank + 1) >> log_split};
  Cursor filled{stages, 1}, read{stages, 0};
  int32_t* union_ids = p.lists.union_ids + int64_t{tile} * p.lists.places;
  for (chunk.first = cluster * most; chunk.first < neurons.total; chunk.first += clusters * most) {
    chunk.size = min(most, padded(neurons.total - chunk.first));
    __syncthreads();  // the previous chunk is written
    neurons.write_places(s.places, chunk.first, chunk.size);
    __syncthreads();
    float acc[kAccumulators];
    if (p.up != nullptr) {
      if (threadIdx.x < kProducers) {
        chunk.produce(filled);
      } else {
        for_width(chunk.size, [&]<int N>() { chunk.template multiply<N>(acc, read); });
      }
    }
    if (threadIdx.x < kProducers) {
      for (int i = rank + split * static_cast<int>(threadIdx.x); i < chunk.size;
           i += split * kProducers) {
        const auto place = static_cast<int>(load_shared4(s.places + i * 4));
        const int id = place < 0 ? -1 : p.lists.ids[int64_t{tile} * p.lists.places + place];
        union_ids[chunk.first + i] = id;
        if (id >= 0) bulk_prefetch(p.down + int64_t{id} * p.width, p.width * 2);
      }
    }
    __syncwarp();
    if (p.up != nullptr) {
      // All have multiplied, and nothing writes the ring buffers any more.
      cluster_arrive_relaxed();
      cluster_wait();
      if (threadIdx.x >= kProducers) chunk.send(acc, log_split, rank);
      __syncwarp();
      cluster_sync();
    }
    if (threadIdx.x >= kProducers) chunk.write(log_split, rank);
    // TMA and gathers write the ring buffer next.
    fence_async_shared();
  }
}

}  // namespace up

namespace down {

constexpr int kStepGroups = 4;
constexpr uint32_t kBytesA = kStepGroups * kGroupBytes;
constexpr uint32_t kColumnBlockBytes = kStepGroups * kGroup * 128;  // 64 rows by 64 columns

struct Params {
  Lists lists;
  const __nv_bfloat16* weight;  // [F, D]
  __nv_bfloat16* y;             // [M, D]
  ActivityCuda* activity;       // or null: unions are not counted
  int tokens, width;
  bool add;
};

// One warp adds the largest union of the call to the counts.
__device__ __forceinline__ void count_largest(const Params& p) {
  const auto lane = static_cast<int>(threadIdx.x) % 32, tiles = static_cast<int>(gridDim.z);
  int largest = 0;
  for (int tile = lane; tile < tiles; tile += 32) largest = max(largest, p.lists.totals[tile]);
  largest = __reduce_max_sync(~0u, largest);
  if (lane != 0) return;
  atomicAdd(&p.activity->union_calls, 1ull);
  atomicAdd(&p.activity->largest_union, static_cast<unsigned long long>(largest));
}

template <int Columns>
constexpr uint32_t kStageBytes = kBytesA + Columns / 64 * kColumnBlockBytes;
template <int Columns>
constexpr int kStages = Columns == 64 ? 8 : 6;
template <int Columns>
constexpr uint32_t kSharedBytes =
    kStages<Columns>* kStageBytes<Columns> + 2 * kStages<Columns> * 8 + 1024;

template <int Columns>
struct Shared {
  uint32_t ring, full, empty;
  __device__ explicit Shared(void* base) {
    ring = (smem_address(base) + 1023) & ~1023u;
    full = ring + kStages<Columns> * kStageBytes<Columns>;
    empty = full + kStages<Columns> * 8;
  }
};

// A warp loads one group of every step: its h by a bulk copy, 16 rows of the weight by gathers.
template <int Columns>
__device__ __forceinline__ void produce(const Params& p, const Shared<Columns>& s, int tile,
                                        int column, int begin, int end) {
  constexpr int kPieces = Columns / 8, kRows = 32 / kPieces;  // 16-byte pieces; rows at a time
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int pieces = p.width / 8, piece = lane % kPieces;
  const bool inside = column + piece * 8 < p.width;
  const uint32_t to_lane = kBytesA + piece / 8 * kColumnBlockBytes + warp * 16 * 128;
  const auto* weight = reinterpret_cast<const uint4*>(p.weight) + column / 8 + piece;
  const int32_t* ids = p.lists.union_ids + int64_t{tile} * p.lists.places;
  const uint8_t* h = p.lists.h + int64_t{tile} * p.lists.places / kGroup * kGroupBytes;
  const auto load_id = [&](int group) {
    return group < end ? ids[group * kGroup + lane % 16] : -1;
  };
  RingCursor<kStages<Columns>> cursor{0, 1};
  int next_id = load_id(begin + warp);
#pragma unroll 1
  for (int group = begin + warp; group - warp < end; group += kStepGroups, cursor.advance()) {
    const int id = next_id;
    next_id = load_id(group + kStepGroups);
    barrier_wait(s.empty + cursor.stage * 8, cursor.parity);
    const uint32_t stage = s.ring + cursor.stage * kStageBytes<Columns>;
    const uint32_t landed = s.full + cursor.stage * 8;
    if (lane == 0) {
      barrier_expect(landed, kGroupBytes);
      // A step's missing groups repeat the last one, multiplied by rows of zeros.
      bulk_load(stage + warp * kGroupBytes, h + int64_t{min(group, end - 1)} * kGroupBytes,
                kGroupBytes, landed);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroup; i += kRows) {
      const int r = i + lane / kPieces;
      const int row = __shfl_sync(~0u, id, r);
      const bool valid = inside && row >= 0;
      gather16(stage + to_lane + r * 128 + ((piece % 8) ^ (r % 8)) * 16,
               weight + (valid ? int64_t{row} * pieces : 0), valid);
    }
    gather_arrive(landed);
  }
}

// Sums of a CTA of the cluster, in the ring buffer's memory: [from CTA][block of 8 columns][thread]
// float4. A CTA adds up a part of the columns, in the order of the CTAs.
template <int Columns>
__device__ __forceinline__ void consume(const Params& p, const Shared<Columns>& s, int tile,
                                        int column, int steps) {
  constexpr int kBlocks = Columns / 8;
  const int thread = static_cast<int>(threadIdx.x) - kProducers, warpgroup = thread / 128;
  float acc[Columns / 2];
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) acc[i] = 0.0f;
  RingCursor<kStages<Columns>> cursor;
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < steps; ++k, cursor.advance()) {
    barrier_wait(s.full + cursor.stage * 8, cursor.parity);
    fence_async_shared();
    const uint32_t stage = s.ring + cursor.stage * kStageBytes<Columns>;
    const uint64_t a = narrow_k_major_operand(stage + warpgroup * (kGroupBytes / 2));
    const uint64_t b = n_major_operand(stage + kBytesA, kColumnBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      wgmma<Columns, true>(acc, a + i * (kGroupBytes / 16), b + i * (2048 / 16), true);
    }
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      if (thread % 128 == 0) barrier_arrive(s.empty + previous * 8);
    }
    previous = cursor.stage;
  }
  wgmma_wait<0>();
  const int split = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  // Blocks that a CTA adds up: kBlocks / split, a power of two.
  const int log_share = __ffs(kBlocks) - __ffs(split), share = 1 << log_share;
  if (split > 1) {
    // All have multiplied, and nothing writes the ring buffers any more.
    cluster_arrive_relaxed();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint32_t to = remote_address(
          s.ring + (((rank << log_share) + (i & (share - 1))) * kConsumers + thread) * 16,
          static_cast<uint32_t>(i >> log_share));
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(acc[4 * i]),
                   "f"(acc[4 * i + 1]), "f"(acc[4 * i + 2]), "f"(acc[4 * i + 3])
                   : "memory");
    }
    cluster_sync();
  }
  const int row = tile * kTokens + warpgroup * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
  const auto write = [&](int at_row, int at_column, float low, float high) {
    if (at_row >= p.tokens || at_column >= p.width) return;
    auto* to = reinterpret_cast<uint32_t*>(p.y + int64_t{at_row} * p.width + at_column);
    if (p.add) {
      const uint32_t old = *to;
      low += low_half(old);
      high += high_half(old);
    }
    *to = bf16x2(low, high);
  };
  const int first = column + thread % 4 * 2;
  if (split == 1) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      write(row, first + 8 * i, acc[4 * i], acc[4 * i + 1]);
      write(row + 8, first + 8 * i, acc[4 * i + 2], acc[4 * i + 3]);
    }
    return;
  }
  for (int i = 0; i < share; ++i) {
    float4 sum{};
    for (int from = 0; from < split; ++from) {
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                   : "r"(s.ring + (((from << log_share) + i) * kConsumers + thread) * 16)
                   : "memory");
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    write(row, first + 8 * (rank * share + i), sum.x, sum.y);
    write(row + 8, first + 8 * (rank * share + i), sum.z, sum.w);
  }
}

// Grid: [CTAs that divide a tile's groups, which form a cluster; columns; tiles].
template <int Columns>
__global__ void __launch_bounds__(kThreads, 1)
    medium_down_sm90_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t memory[];
  const Shared<Columns> shared(memory);
  const int tile = static_cast<int>(blockIdx.z), column = static_cast<int>(blockIdx.y) * Columns;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages<Columns>; ++i) {
      barrier_init(shared.full + i * 8, kProducers);
      barrier_init(shared.empty + i * 8, 2);
    }
    fence_barrier_init();
  }
  wait_for_previous_kernel();
  allow_next_kernel();
  fence_async_global();  // h is read by bulk copies
  __syncthreads();
  const int total = (params.lists.totals[tile] + kGroup - 1) / kGroup;
  const int split = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int begin = total * rank / split, end = total * (rank + 1) / split;
  const int steps = (end - begin + kStepGroups - 1) / kStepGroups;
  if (threadIdx.x < kProducers) {
    registers_decrease<88>();
    if (steps > 0) produce<Columns>(params, shared, tile, column, begin, end);
    if (split > 1) {
      __syncwarp();
      cluster_arrive_relaxed();
      cluster_wait();
      cluster_sync();
    }
    const bool counts = threadIdx.x < 32 && (blockIdx.x | blockIdx.y | blockIdx.z) == 0;
    if (counts && params.activity != nullptr) count_largest(params);
  } else {
    registers_increase<208>();
    consume<Columns>(params, shared, tile, column, steps);
  }
}

}  // namespace down

// Launches as a dependent of the kernel in front, in clusters.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 cluster, uint32_t shared_bytes,
                   cudaStream_t stream, const Params& params) {
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (status != cudaSuccess) return status;
  return launch_dependent_clusters(kernel, grid, cluster, kThreads, shared_bytes, stream, params);
}

}  // namespace
}  // namespace medium_batch

void medium_batch_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                           const MediumBatchWorkspace& workspace) {
  using namespace medium_batch;
  check_ffn_call(ctx, problem.width, problem.ffn);
  TWELL_CHECK(problem.tokens <= workspace.max_tokens && problem.ffn <= workspace.max_ffn,
              "medium batch FFN: [{}, {}] in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              workspace.max_tokens, workspace.max_ffn);
  if (problem.tokens == 0) return;
  const MediumBatchSchedule schedule(problem.tokens, problem.width, problem.ffn,
                                     ctx.multiprocessors());
  const auto tokens = static_cast<int>(problem.tokens), width = static_cast<int>(problem.width),
             ffn = static_cast<int>(problem.ffn);
  // CTAs of a cluster of gate share a segment, or a tile where the number of tiles is odd.
  const int cluster_x = schedule.tiles % 2 == 0 ? 2 : 1;
  const int cluster_y = schedule.tiles % 2 == 0 || schedule.tiles == 1 ? 1 : 2;
  const bool gated = problem.w_gate != nullptr;
  const bool counts_unions = problem.tokens > kMaxFewTokens;
  const Lists lists{.gate = workspace.gate,
                    .ids = workspace.ids,
                    .counts = workspace.counts,
                    .h = workspace.h,
                    .union_ids = workspace.union_ids,
                    .totals = workspace.totals,
                    .places = ceil_div(ffn, kGroup) * kGroup,
                    .segments = static_cast<int>(schedule.segments),
                    .neurons = static_cast<int>(schedule.neurons)};
  const int k_steps = ceil_div(width, kTileK);
  // Operands of `rows` rows, of which a tile has `of_tile` and `ctas` CTAs load a part each; parts
  // are whole swizzle atoms of 8 rows.
  const auto boxes = [&](const void* matrix, int rows, int of_tile, int ctas) {
    const int part = of_tile / ctas;
    const int last = ceil_div(rows - (rows - 1) / of_tile * of_tile, 8 * ctas) * 8;
    return gate::Boxes{.map = matrix_tensor_map(matrix, rows, width, part),
                       .last_map = matrix_tensor_map(matrix, rows, width, last),
                       .rows = part,
                       .last_rows = last};
  };
  const gate::Params of_gate{
      .x = boxes(problem.x, tokens, kTokens, cluster_y),
      .weight = boxes(gated ? problem.w_gate : problem.w_up, ffn, lists.neurons, cluster_x),
      .up = gated ? problem.w_up : nullptr,
      .lists = lists,
      .activity = problem.activity,
      .counts_unions = counts_unions,
      .tokens = tokens,
      .width = width,
      .ffn = ffn,
      .tiles = static_cast<int>(schedule.tiles),
      .k_steps = k_steps,
      .stages = std::min<int>(kMaxStages, gate::kRingBytes / (kBytesX + lists.neurons * 128)),
      .cluster_x = cluster_x,
      .cluster_y = cluster_y,
      .early_weights = problem.weights_are_constant,
      .cut = problem.cut};
  TWELL_CUDA_CHECK(launch(gate::medium_gate_sm90_kernel,
                          dim3(ceil_div(schedule.tiles, cluster_x) * cluster_x,
                               ceil_div(schedule.segments, cluster_y) * cluster_y),
                          dim3(cluster_x, cluster_y), kSharedBytes, ctx.stream(), of_gate));
  const up::Params of_up{.map_x = matrix_tensor_map(problem.x, tokens, width, kTokens),
                         .up = gated ? problem.w_up : nullptr,
                         .down = problem.w_down,
                         .lists = lists,
                         .width = width,
                         .k_steps = k_steps,
                         .squared = problem.squared,
                         .up_relu = problem.up_relu};
  TWELL_CUDA_CHECK(launch(up::medium_up_sm90_kernel,
                          dim3(schedule.up_split, schedule.up_clusters, schedule.tiles),
                          dim3(schedule.up_split), kSharedBytes, ctx.stream(), of_up));
  const down::Params of_down{.lists = lists,
                             .weight = problem.w_down,
                             .y = problem.y,
                             .activity = counts_unions ? problem.activity : nullptr,
                             .tokens = tokens,
                             .width = width,
                             .add = problem.add};
  const auto launch_down = [&]<int Columns>() {
    return launch(down::medium_down_sm90_kernel<Columns>,
                  dim3(schedule.down_split, ceil_div(width, Columns), schedule.tiles),
                  dim3(schedule.down_split), down::kSharedBytes<Columns>, ctx.stream(), of_down);
  };
  TWELL_CUDA_CHECK(schedule.columns == 64 ? launch_down.operator()<64>()
                                          : launch_down.operator()<128>());
}

}  // namespace twell
