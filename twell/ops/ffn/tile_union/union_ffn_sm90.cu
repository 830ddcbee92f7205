// SPDX-License-Identifier: Apache-2.0
// The two GEMMs of the tile-union execution, behind find_unions (unions.cu). Both are
// persistent.
//
// 1. up, with the gate applied in the epilogue: activations[tile] = gate[tile] * (x[tile tokens]
// w_up[union]^T), or the product alone, into a buffer of its own. A work item is 128 tokens by up
// to 192 neurons of one tile's union. Behind a screen, which knows candidates instead of a gate, it
// also computes the gate: an item is up to 128 neurons, whose rows of w_gate and w_up are the two
// halves of one gathered operand, and one WGMMA multiplies both.
//   warpgroup 0     gathers rows of w_up k-step by k-step, and loads x with TMA: the tokens of a
//                   plain tile are consecutive. Heavy rows among them are read too, because that
//                   is simpler; their gate is zero here, or computed in vain, and their y is not
//                   stored. Rows of x of tiles of heavy rows are gathered.
//   warpgroups 1,2  64 tokens each: WGMMA, then h = g * u in shared memory, stored in the layout
//                   that WGMMA reads
//   warpgroup 3     with a gate: writes the gate's non-zeros, which find_unions has listed, to
//                   their places in that layout while the GEMM runs
//
// 2. down: y[tile tokens] = activations[tile] w_down[union], or the sum of two such products for
// backward. A work item is 128 tokens by 256 columns of y; its k-steps are the blocks of 64 neurons
// of the tile's union, none for a tile without non-zeros.
#include <algorithm>
#include <cstdint>

#include "twell/format/byte_rows.cuh"
#include "twell/format/twell_reader.cuh"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/ops/ffn/tile_union/gathered_gemm_sm90.cuh"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union {
namespace {

namespace up {

// The gate compacted onto a part of a tile's union, in shared memory, in the layout WGMMA reads.

constexpr uint32_t kBlockBytes = kTileTokens * kBlock * 2;  // one block of activations

// Writes gate values to the places of an item's neurons.
struct GatePlaces {
  const int first, count;  // positions in the tile's union
  const uint32_t image;    // shared memory of the compacted gate
  const uint32_t words;    // shared memory of a window of words: {mask, neurons below}

  __device__ __forceinline__ uint32_t piece(int block, int row, int index) const {
    return image + block * kBlockBytes + row * 128 + (index ^ (row % 8)) * 16;
  }
  __device__ __forceinline__ void clear(int blocks, int row) const {
    for (int i = 0; i < blocks * 8; ++i) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(piece(i / 8, row, i % 8)),
                   "r"(0)
                   : "memory");
    }
  }
  // Writes one value. word: index in the window; bit: the neuron's bit in it; row: token of the
  // tile.
  __device__ __forceinline__ void put(int word, int bit, int row, uint32_t bits) const {
    uint32_t mask, before;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(mask), "=r"(before)
                 : "r"(words + word * 8)
                 : "memory");
    const int position = static_cast<int>(before) - first + __popc(mask & ((1u << bit) - 1));
    if (static_cast<uint32_t>(position) < static_cast<uint32_t>(count)) {
      put_at(position, row, bits);
    }
  }
  __device__ __forceinline__ void put_at(int position, int row, uint32_t bits) const {
    const uint32_t at = piece(position / kBlock, row, position % kBlock / 8) + position % 8 * 2;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(static_cast<uint16_t>(bits)) : "memory");
  }
  // A warp writes the `listed` entries of a column tile whose first word is `base`.
  __device__ __forceinline__ void put_listed(const uint32_t* entries, int listed, int base) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < listed; i += 32 * kAhead) {
      uint32_t next[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) next[j] = i + 32 * j < listed ? entries[i + 32 * j] : 0;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + 32 * j >= listed) break;
        put(base + next[j] / 32 % 8, next[j] % 32, next[j] >> 8 & 127, next[j] >> 16);
      }
    }
  }
  // A thread writes one token's words of a column tile.
  __device__ __forceinline__ void put_packed(const uint4* source, int non_zeros, int base,
                                             int row) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = 0; i <= non_zeros; i += 4 * kAhead) {
      uint4 next[kAhead] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + 4 * j <= non_zeros) next[j] = source[i / 4 + j];
      }
#pragma unroll
      for (int j = 0; j < 4 * kAhead; ++j) {
        const uint4& of = next[j / 4];
        const uint32_t word = j % 4 == 0 ? of.x : j % 4 == 1 ? of.y : j % 4 == 2 ? of.z : of.w;
        if (i + j == 0 || i + j > non_zeros) continue;
        put(base + twell_reader::mask_word(word), twell_reader::mask_bit(word), row,
            twell_reader::bf16_bits(word));
      }
    }
  }
  // A thread writes columns [begin, end) of a spilled tile's values.
  __device__ __forceinline__ void put_spilled(const uint4* source, int base, int begin, int end,
                                              int row) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = begin / 8; i * 8 < end; i += kAhead) {
      uint4 values[kAhead] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if ((i + j) * 8 < end) values[j] = source[i + j];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) put_eight(values[j], base, (i + j) * 8, row);
    }
  }
  // Writes the values of eight neighbouring columns that are in the union.
  __device__ __forceinline__ void put_eight(const uint4& values, int base, int column,
                                            int row) const {
    if ((values.x | values.y | values.z | values.w) == 0) return;
    uint32_t mask, before;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(mask), "=r"(before)
                 : "r"(words + (base + column / 32) * 8)
                 : "memory");
    const int bit = column % 32;
    int position = static_cast<int>(before) - first + __popc(mask & ((1u << bit) - 1));
    const uint32_t fires = mask >> bit & 0xff;
    if (fires == 0xff && position % 8 == 0 && position >= 0 && position + 8 <= count) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                       piece(position / kBlock, row, position % kBlock / 8)),
                   "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                   : "memory");
      return;
    }
    const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t bits = parts[k / 2] >> (k % 2 * 16);
      const bool in = fires >> k & 1;
      if (in && static_cast<uint32_t>(position) < static_cast<uint32_t>(count)) {
        put_at(position, row, bits);
      }
      position += in;
    }
  }
};

constexpr int kStages = 4;
constexpr int kTileK = 64;
constexpr uint32_t kBytesX = kTileTokens * kTileK * 2;

// Column tiles whose words {mask, neurons below} are in shared memory at a time.
constexpr int kWindow = 128;

// What the kernel makes of x w_up[union]^T: the product alone, its product with a gate, or with the
// gate that it computes itself.
enum class Makes { kProduct, kGated, kGateToo };

// kBytes: x and w_up are e4m3; a k-step is 128 bytes of a row either way.
template <Makes kMakes, bool kBytes>
struct Sizes {
  static_assert(!kBytes || kMakes == Makes::kGated);
  static constexpr int kStep = kBytes ? 2 * kTileK : kTileK;  // columns of a k-step
  static constexpr int kPiece = kBytes ? 16 : 8;              // columns of 16 bytes
  static constexpr bool kGated = kMakes == Makes::kGated, kGateToo = kMakes == Makes::kGateToo;
  static constexpr int kBlocks = kGateToo ? kGateUpBlocks : kMaxChunkBlocks;  // of an item
  static constexpr int kWeights = kGateToo ? 2 : 1;  // matrices whose rows are gathered
  static constexpr int kAccumulators = kWeights * kBlocks * kBlock / 2;
  static constexpr uint32_t kStageBytes = kBytesX + kWeights * kBlocks * kBlock * kTileK * 2;
  static constexpr uint32_t kGateBytes = kBlocks * kBlockBytes;
  static constexpr uint32_t kPlacesBytes = kGated ? kWindow * 8 * 8 : 0;
  // Includes barriers and slack for alignment to the swizzle atom.
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes + kGateBytes + kPlacesBytes +
                                           ItemFeed::kBytes + 2 * kStages * 8 + 16 + 1024;
  // With a gate there is one more warpgroup: 256 * 168 + 256 * 88 = 65,536 registers.
  static constexpr int kCtaThreads = kGated ? kThreads + kTileTokens : kThreads;
  static constexpr int kRegisters = kGated ? 168 : kConsumerRegisters;
  // find_unions adds items while the kernel runs, and down follows its tiles.
  static constexpr bool kFollows = kMakes != Makes::kProduct;
};

template <Makes kMakes, bool kBytes>
struct Shared {
  uint32_t ring, gate, places, feed, full, empty, gate_full, gate_empty;
  __device__ explicit Shared(void* base) {
    using S = Sizes<kMakes, kBytes>;
    ring = (gpu::smem_address(base) + 1023) & ~1023u;
    gate = ring + kStages * S::kStageBytes;
    places = gate + S::kGateBytes;
    feed = places + S::kPlacesBytes;
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
  // Loads {tile, first block, blocks | plain << 8 | first block within the tile << 16, neurons of
  // the tile's union from there on}.
  template <bool Follows>
  __device__ static int4 load(const Up& gemm, int index) {
    const Tiles& tiles = gemm.tiles;
    constexpr int4 kEnd{-1, 0, 0, 0};
    int2 item;
    int plain_tiles;
    if constexpr (Follows) {  // find_unions adds items while this kernel runs
      if (index >= tiles.max_up_items) return kEnd;
      item = gpu::load_acquire(tiles.up_items + index);
      if (item.y == 0) {
        const bool complete = gpu::load_acquire(&tiles.counts->complete) != 0;
        item = gpu::load_acquire(tiles.up_items + index);
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
  __device__ uint8_t* blocks_of(__nv_bfloat16* image, uint32_t block_bytes) const {
    return reinterpret_cast<uint8_t*>(image) + int64_t{first_block} * block_bytes;
  }
};

// What producer thread p gathers: 16-byte piece p % 8 of rows p / 8 + 16 i of the stage's operands.
// Piece: columns of 16 bytes.
template <int Blocks, int Piece>
struct GatherRows {
  static constexpr uint32_t kNone = ~0u;
  uint32_t x[kTileTokens / 16];  // first 16-byte piece of the row, or kNone
  uint32_t w[Blocks * kBlock / 16];

  __device__ __forceinline__ GatherRows(const Up& gemm, const Item& item) {
    const int p = threadIdx.x % kProducers;
    const int pieces = gemm.width / Piece;
    const int32_t* tokens = gemm.tiles.tokens + item.tile * kTileTokens;
    const int32_t* ids = gemm.tiles.union_ids + int64_t{item.first_block} * kBlock;
#pragma unroll
    for (int i = 0; i < kTileTokens / 16; ++i) {
      const int token = item.plain ? -1 : tokens[p / 8 + 16 * i];
      x[i] = token < 0 ? kNone : static_cast<uint32_t>(token) * pieces + p % 8;
    }
#pragma unroll
    for (int i = 0; i < Blocks * kBlock / 16; ++i) {
      const int position = p / 8 + 16 * i;
      w[i] =
          position < item.neurons ? static_cast<uint32_t>(ids[position]) * pieces + p % 8 : kNone;
    }
  }
};

template <int Blocks, int Piece>
__device__ __forceinline__ void gather_weight(const void* weight,
                                              const GatherRows<Blocks, Piece>& rows, int blocks,
                                              uint32_t dst, uint32_t piece, bool inside) {
  const auto* w = static_cast<const uint4*>(weight) + piece;
#pragma unroll
  for (int block = 0; block < Blocks; ++block) {
    if (block >= blocks) break;
#pragma unroll
    for (int j = 0; j < kBlock / 16; ++j) {
      const int i = block * (kBlock / 16) + j;
      const bool valid = inside && rows.w[i] != rows.kNone;
      gpu::gather16(dst + i * 2048, w + (valid ? rows.w[i] : 0), valid);
    }
  }
}

template <Makes kMakes, bool kBytes>
__device__ __forceinline__ void gather_step(
    const Up& gemm,
    const GatherRows<Sizes<kMakes, kBytes>::kBlocks, Sizes<kMakes, kBytes>::kPiece>& rows,
    const Item& item, uint32_t stage, int k) {
  using S = Sizes<kMakes, kBytes>;
  const int p = threadIdx.x % kProducers;
  const bool inside = k * S::kStep + p % 8 * S::kPiece < gemm.width;
  const uint32_t piece = k * 8;  // of a row: a k-step has 8 of 16 bytes
  uint32_t dst = stage + p / 8 * 128 + ((p % 8) ^ (p / 8 % 8)) * 16;
  const void* const all_x = kBytes ? static_cast<const void*>(gemm.x_bytes.values) : gemm.x;
  const void* const weight =
      kBytes ? static_cast<const void*>(gemm.weight_bytes.values) : gemm.weight;
  const auto* x = static_cast<const uint4*>(all_x) + piece;
  if (!item.plain) {
#pragma unroll
    for (int i = 0; i < kTileTokens / 16; ++i) {
      const bool valid = inside && rows.x[i] != rows.kNone;
      gpu::gather16(dst + i * 2048, x + (valid ? rows.x[i] : 0), valid);
    }
  }
  dst += kBytesX;
  if constexpr (kMakes == Makes::kGateToo) {
    gather_weight(gemm.gate_weight, rows, item.blocks, dst, piece, inside);
    dst += item.blocks * (kBlock * 128);
  }
  gather_weight(weight, rows, item.blocks, dst, piece, inside);
}

template <Makes kMakes, bool kBytes>
__device__ __forceinline__ void produce(const Up& gemm, const Shared<kMakes, kBytes>& shared) {
  using namespace gpu;
  using S = Sizes<kMakes, kBytes>;
  GatherRing<kStages> ring{shared.full, shared.empty};
  const int k_steps = (gemm.width + S::kStep - 1) / S::kStep;
  ItemFeed feed{shared.feed};
  ItemFeeder feeder(feed, gemm.taken,
                    [&](int index) { return Item::load<S::kFollows>(gemm, index); });
  for (;;) {
    feeder.publish();
    __syncwarp();  // without it the warp gathers in two halves, several times slower
    const Item item(feed.take());
    if (item.tile < 0) break;
    const GatherRows<S::kBlocks, S::kPiece> rows(gemm, item);
    for (int k = 0; k < k_steps; ++k) {
      const int index_of_stage = ring.acquire();
      const uint32_t stage = shared.ring + index_of_stage * S::kStageBytes;
      if (item.plain && threadIdx.x == 0) {
        const uint32_t landed = shared.full + index_of_stage * 8;
        barrier_expect(landed, kBytesX);
        tensor_load(stage, &gemm.map_x, k * S::kStep, item.tile * kTileTokens, landed);
      }
      gather_step<kMakes, kBytes>(gemm, rows, item, stage, k);
      ring.commit();
    }
  }
}

// The warpgroup that compacts the gate, item after item.
template <bool kBytes>
__device__ __forceinline__ void place_gates(const Up& gemm,
                                            const Shared<Makes::kGated, kBytes>& shared) {
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
      gpu::named_barrier(kBarrier, kPlacers);  // all threads are done with the previous window
      for (int i = thread; i < (end - window) * 8; i += kPlacers) {
        const int64_t at = (first_column_tile + window) * 8 + i;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared.places + i * 8),
                     "r"(tiles.mask[at]), "r"(tiles.before[at])
                     : "memory");
      }
      const int32_t* listed = tiles.listed + first_column_tile;
      if (window == low / 256) {
        gpu::barrier_wait(shared.gate_empty, parity);  // the previous item's result is stored
        places.clear(item.blocks, thread);
      }
      gpu::named_barrier(kBarrier, kPlacers);
#pragma unroll 1
      for (int t = window + warp; t < end; t += kPlacers / 32) {
        const int64_t at = first_column_tile + t;
        const int entries = tiles.listed[at];
        if (entries > kListed) continue;
        places.put_listed(tiles.entries + at * kListed, entries, (t - window) * 8);
      }
      // Column tiles with too many non-zeros to list.
#pragma unroll 1
      for (int t = window; t < end; ++t) {
        if (token < 0 || listed[t] <= kListed) continue;
        const uint4* source = twell_reader::tile_quads(gate, token, t);
        const uint4 head = source[0];
        if (!twell_reader::is_spilled(gate, static_cast<int>(head.x))) {
          places.put_packed(source, static_cast<int>(head.x), (t - window) * 8, thread);
        } else {
          places.put_spilled(twell_reader::spilled_values(gate, head.y), (t - window) * 8,
                             max(low - t * 256, 0), min(high + 1 - t * 256, 256), thread);
        }
      }
    }
    gpu::barrier_arrive(shared.gate_full);
  }
}

// The k-step that signals the blocks of the previous item, whose stores are long complete by then.
constexpr int kTellStep = 4;

// State of a consumer warpgroup, kept across items.
template <Makes kMakes, bool kBytes>
struct Consumer {
  using S = Sizes<kMakes, kBytes>;
  const Up& gemm;
  const Shared<kMakes, kBytes>& shared;
  const int warpgroup = threadIdx.x / 128 - 1;
  const int thread = threadIdx.x % 128;
  StageReader<kStages> ring{shared.full, shared.empty};
  uint32_t gate_parity = 0;
  bool storing = false;
  int stored_tile = -1, stored_blocks = 0;  // stored but not yet signalled to down

  // Every thread releases what it wrote, because racecheck does not recognise a release by one
  // thread for all behind the warpgroup's barrier.
  __device__ __forceinline__ void finish_store() {
    if (storing) {
      if (thread == 0) gpu::bulk_store_wait_read();
      if (S::kGated) gpu::barrier_arrive(shared.gate_empty);
    }
    storing = false;
  }

  // Signals to down the blocks stored last.
  __device__ __forceinline__ void tell() {
    if (S::kFollows && stored_tile >= 0 && thread == 0 && gemm.tiles.ready != nullptr) {
      gpu::bulk_store_wait();
      gpu::add_release(gemm.tiles.ready + stored_tile, stored_blocks);
    }
    stored_tile = -1;
  }

  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[S::kAccumulators], int k_steps) {
    using namespace gpu;
    int previous = 0;
    for (int k = 0; k < k_steps; ++k) {
      const int current = ring.wait();
      const uint32_t stage = shared.ring + current * S::kStageBytes;
      const uint64_t a = k_major_operand(stage + warpgroup * (kBytesX / 2));
      const uint64_t b = k_major_operand(stage + kBytesX);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        if constexpr (kBytes) {
          wgmma_e4m3<N>(acc, a + i * 2, b + i * 2, k > 0 || i > 0);
        } else {
          wgmma<N, false>(acc, a + i * 2, b + i * 2, k > 0 || i > 0);
        }
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
    tell();  // if the item had too few k-steps
  }

  // Applies the scales of both operands' rows.
  template <int N>
  __device__ __forceinline__ void scale(float (&acc)[S::kAccumulators], const Item& item) const {
    const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const auto of_token = [&](int r) {
      const int token = gemm.tiles.tokens[item.tile * kTileTokens + r];
      return token < 0 ? 0.0f : __ldg(gemm.x_bytes.scales + token);
    };
    const float upper = of_token(row), lower = of_token(row + 8);
    const int32_t* ids = gemm.tiles.union_ids + int64_t{item.first_block} * kBlock;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const int position = 8 * i + thread % 4 * 2;
      const auto of_neuron = [&](int at) {
        return at < item.neurons ? __ldg(gemm.weight_bytes.scales + ids[at]) : 0.0f;
      };
      const float even = of_neuron(position), odd = of_neuron(position + 1);
      acc[4 * i] *= upper * even;
      acc[4 * i + 1] *= upper * odd;
      acc[4 * i + 2] *= lower * even;
      acc[4 * i + 3] *= lower * odd;
    }
  }

  // h = f(g) * u in f32, rounded once; or u alone.
  template <int N>
  __device__ __forceinline__ void write_result(const float (&acc)[S::kAccumulators]) {
    const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const uint32_t base = shared.gate + row * 128 + thread % 4 * 4;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint32_t at = base + i / 8 * kBlockBytes + ((i % 8) ^ (row % 8)) * 16;
      write_pair(at, acc[4 * i], acc[4 * i + 1]);
      write_pair(at + 8 * 128, acc[4 * i + 2], acc[4 * i + 3]);
    }
  }
  __device__ __forceinline__ void write_pair(uint32_t at, float low, float high) const {
    uint32_t pair;
    if (S::kGated) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(at));
      apply_gate(pair, low, high);
    }
    pair = gpu::bf16x2(low, high);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
  }
  __device__ __forceinline__ void apply_gate(uint32_t gates, float& low, float& high) const {
    low = gpu::relu_if(gemm.gate.up_relu, low);
    high = gpu::relu_if(gemm.gate.up_relu, high);
    if (gemm.gate.squared) {
      low *= gpu::low_half(gates);
      high *= gpu::high_half(gates);
    }
    low *= gpu::low_half(gates);
    high *= gpu::high_half(gates);
  }

  // h in e4m3, as ByteBlocks with the smallest exponents that fit each token's values. Each warp's
  // part of a block, 16 tokens, takes the place of the first half of its gates.
  template <int N>
  __device__ __forceinline__ void write_bytes(float (&acc)[S::kAccumulators], const Item& item) {
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const uint32_t part = shared.gate + (warpgroup * 64 + warp * 16) * 128;
    float largest[2] = {};  // of rows g and g + 8 of the warp
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint32_t at = part + g * 128 + i / 8 * kBlockBytes + ((i % 8) ^ g) * 16 + t * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t gates;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(gates) : "r"(at + half * 8 * 128));
        float &low = acc[4 * i + 2 * half], &high = acc[4 * i + 2 * half + 1];
        apply_gate(gates, low, high);
        largest[half] = fmaxf(largest[half], fmaxf(fabsf(low), fabsf(high)));
      }
    }
    const int row = warpgroup * 64 + warp * 16 + g;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
      const int exponent = ByteBlock::exponent_of(largest[half]);
      inverse[half] = __int_as_float((127 - max(exponent, -126)) << 23);
      if (t != 0) continue;
      uint8_t* to = item.blocks_of(gemm.tiles.activations, ByteBlock::kBytes) + ByteBlock::kValues +
                    row + 8 * half;
      for (int block = 0; block < N / kBlock; ++block) {
        to[block * ByteBlock::kBytes] = static_cast<uint8_t>(exponent);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {  // 16 neurons are a piece
      const uint32_t at =
          part + i / 8 * kBlockBytes + g * 64 + ((i / 2 % 4) ^ (g / 2)) * 16 + t * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* h = acc + 4 * i + 2 * half;
        const uint32_t bytes =
            byte_rows::quantise4<ByteType::kE4M3>(h[0], h[1], h[4], h[5], inverse[half]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + half * 8 * 64), "r"(bytes) : "memory");
      }
    }
  }

  // The same of N neurons whose gates are the first half of acc: g is rounded as by the gate GEMM.
  // Counts the pairs that fire.
  template <int N>
  __device__ __forceinline__ void write_both(const float (&acc)[S::kAccumulators],
                                             const Item& item) const {
    const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const uint32_t base = shared.gate + row * 128 + thread % 4 * 4;
    uint32_t fires[2] = {};  // of the upper and the lower row, even and odd columns
    const auto write = [&](uint32_t at, uint32_t& count, const float* g, const float* u) {
      const uint32_t gates = gpu::above(gpu::relu_bf16x2(g[0], g[1]), gemm.gate.cut);
      count += __vminu2(gates, 0x00010001u);
      float low = u[0], high = u[1];
      apply_gate(gates, low, high);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(gpu::bf16x2(low, high)) : "memory");
    };
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint32_t at = base + i / 8 * kBlockBytes + ((i % 8) ^ (row % 8)) * 16;
      write(at, fires[0], acc + 4 * i, acc + N / 2 + 4 * i);
      write(at + 8 * 128, fires[1], acc + 4 * i + 2, acc + N / 2 + 4 * i + 2);
    }
    if (gemm.activity == nullptr && gemm.row_nnz == nullptr) return;
    const int32_t* tokens = gemm.tiles.tokens + item.tile * kTileTokens + row;
    int count = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = tokens[8 * i];
      const int of_row = token < 0 ? 0 : static_cast<int>((fires[i] & 0xffff) + (fires[i] >> 16));
      count += of_row;
      if (gemm.row_nnz != nullptr && of_row > 0) atomicAdd(gemm.row_nnz + token, of_row);
    }
    count = __reduce_add_sync(~0u, count);
    if (gemm.activity != nullptr && thread % 32 == 0 && count > 0) {
      atomicAdd(&gemm.activity->nnz, static_cast<unsigned long long>(count));
    }
  }

  // One thread stores this warpgroup's half of an item's blocks.
  template <int Blocks>
  __device__ __forceinline__ void store_blocks(const Item& item) const {
    const uint32_t half = warpgroup * (kBlockBytes / 2);
    if constexpr (kBytes) {
      constexpr uint32_t kPart = ByteBlock::kValues / 8;  // of a warp
      uint8_t* out =
          item.blocks_of(gemm.tiles.activations, ByteBlock::kBytes) + warpgroup * 4 * kPart;
      for (int i = 0; i < Blocks * 4; ++i) {
        gpu::bulk_store(out + i / 4 * ByteBlock::kBytes + i % 4 * kPart,
                        shared.gate + half + i / 4 * kBlockBytes + i % 4 * (kBlockBytes / 8),
                        kPart);
      }
    } else {
      uint8_t* out =
          item.blocks_of(S::kFollows ? gemm.tiles.activations : gemm.product, kBlockBytes) + half;
      for (int block = 0; block < Blocks; ++block) {
        gpu::bulk_store(out + block * kBlockBytes, shared.gate + half + block * kBlockBytes,
                        kBlockBytes / 2);
      }
    }
  }

  // N: rows of the gathered operand.
  template <int N>
  __device__ __forceinline__ void run(float (&acc)[S::kAccumulators], const Item& item,
                                      int k_steps) {
    using namespace gpu;
    multiply<N>(acc, k_steps);
    if constexpr (kBytes) {
      wgmma_hold(acc);
      scale<N>(acc, item);
    }
    if (S::kGated) {
      barrier_wait(shared.gate_full, gate_parity);
      gate_parity ^= 1;
    } else {
      named_barrier(1 + warpgroup, 128);  // the memory of this warpgroup's previous store is free
    }
    if constexpr (S::kGateToo) {
      write_both<N / 2>(acc, item);
    } else if constexpr (kBytes) {
      write_bytes<N>(acc, item);
    } else {
      write_result<N>(acc);
    }
    fence_async_shared();
    named_barrier(1 + warpgroup, 128);
    if (thread == 0) {
      store_blocks<N / S::kWeights / kBlock>(item);
      bulk_store_commit();
    }
    storing = true;
    stored_tile = item.tile;
    stored_blocks = item.blocks;
  }
};

template <Makes kMakes, bool kBytes>
__device__ __forceinline__ void consume(const Up& gemm, const Shared<kMakes, kBytes>& shared) {
  using S = Sizes<kMakes, kBytes>;
  Consumer<kMakes, kBytes> consumer{gemm, shared};
  const int k_steps = (gemm.width + S::kStep - 1) / S::kStep;
  ItemFeed feed{shared.feed};
  float acc[S::kAccumulators];
  for (;;) {
    const Item item(feed.take());
    if (item.tile < 0) break;
    constexpr int kBlockRows = S::kWeights * kBlock;
    switch (item.blocks) {
      case 1:
        consumer.template run<kBlockRows>(acc, item, k_steps);
        break;
      case 2:
        consumer.template run<2 * kBlockRows>(acc, item, k_steps);
        break;
      default:
        if constexpr (S::kBlocks == 3) consumer.template run<3 * kBlockRows>(acc, item, k_steps);
        break;
    }
  }
  consumer.tell();
  if (consumer.thread == 0) gpu::bulk_store_wait();
}

template <Makes kMakes, bool kBytes>
__global__ void __launch_bounds__(Sizes<kMakes, kBytes>::kCtaThreads, 1)
    tile_union_up_sm90_kernel(const __grid_constant__ Up gemm) {
  using S = Sizes<kMakes, kBytes>;
  extern __shared__ uint8_t memory[];
  const Shared<kMakes, kBytes> shared(memory);
  if (threadIdx.x == 0) {
    init_ring(shared.full, shared.empty, kStages);
    ItemFeed{shared.feed}.init(S::kCtaThreads);
    gpu::barrier_init(shared.gate_full, kTileTokens);
    gpu::barrier_init(shared.gate_empty, kConsumerWarpgroups * 128);
    gpu::fence_barrier_init();
    gpu::prefetch_tensor_map(&gemm.map_x);
  }
  __syncthreads();
  if constexpr (!S::kFollows) gpu::wait_for_previous_kernel();
  gpu::allow_next_kernel();
  if (gemm.condition != nullptr && *gemm.condition == 0) return;
  if (threadIdx.x < kProducers) {
    gpu::registers_decrease<kProducerRegisters>();
    produce(gemm, shared);
  } else if (threadIdx.x < kThreads) {
    gpu::registers_increase<S::kRegisters>();
    consume(gemm, shared);
  } else if constexpr (S::kGated) {
    gpu::registers_decrease<kProducerRegisters>();
    place_gates(gemm, shared);
  }
  // Our successor waits only for us, so we must outlive our predecessor.
  if constexpr (S::kFollows) gpu::wait_for_previous_kernel();
}

}  // namespace up

// kScaled: columns of the weight have scales.
template <bool kScaled>
struct DownProblem : DownItems {
  static constexpr bool kOrdered = false;

  const float* y_scales;  // [D] with kScaled

  // tiles.ready is not null: find_unions may still be running.
  __device__ __forceinline__ void wait_for_items() const {
    while (gpu::load_acquire(&tiles.counts->complete) == 0) __nanosleep(100);
  }
  __device__ __forceinline__ int4 load(int index) const {
    return index >= items() ? int4{-1, 0, 0, 0} : second(first(index));
  }

  // Writes y through shared memory, so that rows are written in whole 256-byte pieces.
  struct Store {
    const DownProblem& problem;
    const int column;
    const bool empty;   // no neuron of the tile is active
    int32_t tokens[8];  // rows of y that this lane writes; negative: none

    // Row, among its warpgroup's 64, that this lane writes in store i; a warp writes two at a time.
    __device__ __forceinline__ static int stored_row(int i) {
      return threadIdx.x % 128 / 32 * 16 + i * 2 + threadIdx.x % 32 / 16;
    }
    __device__ __forceinline__ Store(const DownProblem& problem_in, const int4& item)
        : problem(problem_in), column(item.y), empty(item.z == 0) {
      const int warpgroup = threadIdx.x / 128 - 1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        tokens[i] = problem.tiles.tokens[item.x * kTileTokens + warpgroup * 64 + stored_row(i)];
        if (problem.y_rows != nullptr && tokens[i] >= 0) tokens[i] = problem.y_rows[tokens[i]];
      }
    }
    __device__ __forceinline__ void operator()(const float (&acc)[128], uint32_t out) const {
      if (problem.add && empty) return;
      store_half(acc, out, 0);
      store_half(acc, out, 1);
    }
    // Writes columns [128 half, 128 half + 128) of this warpgroup's rows.
    __device__ __forceinline__ void store_half(const float (&acc)[128], uint32_t out,
                                               int half) const {
      const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
      const int row = warp * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int a = 4 * (half * 16 + i);
        const uint32_t at = out + row * 256 + (i ^ (row % 8)) * 16 + lane % 4 * 4;
        float2 scale{1.0f, 1.0f};
        if constexpr (kScaled) {
          const int of = column + half * 128 + i * 8 + lane % 4 * 2;
          if (of < problem.width) {
            scale = __ldg(reinterpret_cast<const float2*>(problem.y_scales + of));
          }
        }
        const uint32_t upper = gpu::bf16x2(acc[a] * scale.x, acc[a + 1] * scale.y);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(upper) : "memory");
        const uint32_t lower = gpu::bf16x2(acc[a + 2] * scale.x, acc[a + 3] * scale.y);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * 256), "r"(lower) : "memory");
      }
      __syncwarp();  // a warp stores the 16 rows that it wrote
      const int first = column + half * 128 + lane % 16 * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int from = stored_row(i);
        uint4 values;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                     : "r"(out + from * 256 + ((lane % 16) ^ (from % 8)) * 16));
        if (tokens[i] >= 0 && first < problem.width) {
          __nv_bfloat16* to = problem.y + int64_t{tokens[i]} * problem.width + first;
          if (problem.add) {
            gpu::reduce_add16(to, values);
          } else {
            *reinterpret_cast<uint4*>(to) = values;
          }
        }
      }
      __syncwarp();
    }
  };
};

template <up::Makes kMakes, bool kBytes = false>
cudaError_t launch_up(const Up& up, int ctas, cudaStream_t stream) {
  using S = up::Sizes<kMakes, kBytes>;
  const auto kernel = up::tile_union_up_sm90_kernel<kMakes, kBytes>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(ctas), S::kCtaThreads, S::kSharedBytes, stream, up);
}

}  // namespace

cudaError_t launch_up_sm90(const Up& up, int ctas, cudaStream_t stream) {
  using up::Makes;
  if (!up.x_bytes.empty()) return launch_up<Makes::kGated, true>(up, ctas, stream);
  if (up.product != nullptr) return launch_up<Makes::kProduct>(up, ctas, stream);
  return up.gate_weight != nullptr ? launch_up<Makes::kGateToo>(up, ctas, stream)
                                   : launch_up<Makes::kGated>(up, ctas, stream);
}

template <bool kScaled>
static cudaError_t launch_down(const Down& down, int ctas, cudaStream_t stream) {
  const DownProblem<kScaled> problem{DownItems(down), down.y_scales};
  return down.tiles.ready != nullptr ? gathered::launch<true>(problem, ctas, stream)
                                     : gathered::launch(problem, ctas, stream);
}

cudaError_t launch_down_sm90(const Down& down, int ctas, cudaStream_t stream) {
  return down.y_scales != nullptr ? launch_down<true>(down, ctas, stream)
                                  : launch_down<false>(down, ctas, stream);
}

}  // namespace twell::tile_union
