// SPDX-License-Identifier: Apache-2.0
// Per tile of tokens: the union of its active neurons, and its activations compacted onto it.
// One cluster per tile, whose CTAs share the columns and learn each other's part sizes.
#include <cooperative_groups.h>

#include <cstdint>

#include "twell/ops/sparse_up_down/tile_union.h"

namespace twell::tile_union {
namespace {

constexpr int kThreads = 512;
constexpr int kCluster = 8;
static_assert(kMaxFfn == (kStaged - 8 - kBlock) / 256 * 256 * kCluster);

// Spilled tiles met by a batch of pairs, shared out to whole warps: they come in bunches, and a
// thread or a warp that met many would hold up the rest.
struct SpilledTiles {
  int count[2];         // of even and of odd batches
  int2 list[kThreads];  // {slot | column tile << 8, spill slot}
};

// The (token, column tile) pairs of one CTA: tokens of the tile by a range of column tiles.
struct Pairs {
  Gate gate;
  const int32_t* tokens;  // [kTileTokens], shared
  int first, count;       // column tiles
  SpilledTiles* spilled;  // shared

  // For the given slots: calls visit.entry(slot, column, bf16 bits) for the non-zeros of packed
  // tiles, each on some thread, and visit.eight(slot, first column, values), by whole warps, for
  // spilled ones. Starts and ends with a barrier of the CTA.
  template <typename Visit>
  __device__ void for_each(int first_slot, int slot_count, const Visit& visit) const {
    const int pairs = slot_count * count;
    if (threadIdx.x < 2) spilled->count[threadIdx.x] = 0;
    __syncthreads();
    for (int base = 0, batch = 0; base < pairs; base += kThreads, batch ^= 1) {
      const int index = base + static_cast<int>(threadIdx.x);
      const int slot = first_slot + index / count, col_tile = first + index % count;
      const int token = index < pairs ? tokens[slot] : -1;
      if (token >= 0) {
        const auto* source = reinterpret_cast<const uint4*>(
            gate.words + (int64_t{token} * gate.col_tiles + col_tile) * gate.slots);
        const uint4 head = source[0];
        if (static_cast<int>(head.x) < gate.slots) {
          packed(source, head, slot, col_tile, visit);
        } else {
          spilled->list[atomicAdd(&spilled->count[batch], 1)] =
              int2{slot | col_tile << 8, static_cast<int>(head.y)};
        }
      }
      __syncthreads();
      read_spilled(spilled->count[batch], visit);
      __syncthreads();
      if (threadIdx.x == 0) spilled->count[batch] = 0;  // for the batch after the next
    }
  }

 private:
  // head: words 0 .. 3, the count among them.
  template <typename Visit>
  __device__ static void packed(const uint4* source, const uint4& head, int slot, int col_tile,
                                const Visit& visit) {
    const int non_zeros = static_cast<int>(head.x);
    const auto entry = [&](int i, uint32_t word) {
      if (i <= non_zeros) {
        visit.entry(slot, col_tile * 256 + static_cast<int>(word & 0xff), word >> 16);
      }
    };
    entry(1, head.y);
    entry(2, head.z);
    entry(3, head.w);
    constexpr int kInFlight = 2;
    for (int i = 4; i <= non_zeros; i += 4 * kInFlight) {
      uint4 next[kInFlight] = {};
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (i + 4 * j <= non_zeros) next[j] = source[i / 4 + j];
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        entry(i + 4 * j, next[j].x);
        entry(i + 4 * j + 1, next[j].y);
        entry(i + 4 * j + 2, next[j].z);
        entry(i + 4 * j + 3, next[j].w);
      }
    }
  }

  // A warp reads a spilled tile together, 8 values per lane.
  template <typename Visit>
  __device__ void read_spilled(int tiles, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
    const auto load = [&](int i) {
      return i < tiles ? gate.spill[int64_t{spilled->list[i].y} * 32 + lane] : uint4{};
    };
    uint4 next = load(threadIdx.x / 32);
    for (int i = threadIdx.x / 32; i < tiles; i += kThreads / 32) {
      const uint4 values = next;
      next = load(i + kThreads / 32);
      const int tile = spilled->list[i].x;
      visit.eight(tile & 0xff, (tile >> 8) * 256 + lane * 8, values);
    }
  }
};

// Bit j: value j of eight bf16 values is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(const uint4& values) {
  const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    bits |= ((parts[j] & 0x7fff) != 0) << (2 * j) | ((parts[j] & 0x7fff0000) != 0) << (2 * j + 1);
  }
  return bits;
}

// First pass: which neurons are active at all.
struct MarkActive {
  uint32_t* mask;  // [words of this CTA], shared; a bit per neuron
  int first_word;

  __device__ void entry(int, int column, uint32_t) const {
    atomicOr(&mask[column / 32 - first_word], 1u << (column % 32));
  }
  __device__ void eight(int, int column, const uint4& values) const {
    uint32_t bits = nonzero_bits(values) << (column % 32);
    bits |= __shfl_xor_sync(~0u, bits, 1);  // four lanes make one word
    bits |= __shfl_xor_sync(~0u, bits, 2);
    if (threadIdx.x % 4 == 0 && bits != 0) atomicOr(&mask[column / 32 - first_word], bits);
  }
};

// Second pass: the values of some slots, at their neuron's position in the union, into a staging
// buffer of `pitch` values per slot.
struct StageValues {
  const uint32_t* mask;
  const int* before;  // neurons of this CTA's part of the union in words below
  int first_word;
  uint16_t* staged;  // position 0 of slot 0: shifted back by what precedes the first staged one
  int pitch;

  __device__ void entry(int slot, int column, uint32_t bits) const {
    const int i = column / 32 - first_word;
    const int position = before[i] + __popc(mask[i] & ((1u << (column % 32)) - 1));
    staged[slot * pitch + position] = static_cast<uint16_t>(bits);
  }
  __device__ void eight(int slot, int column, const uint4& values) const {
    const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
    const int i = column / 32 - first_word;
    const uint32_t word = mask[i];
    const int position = before[i] + __popc(word & ((1u << (column % 32)) - 1));
    uint16_t* to = staged + slot * pitch + position;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if ((word >> (column % 32 + j) & 1) == 0) continue;
      *to++ = static_cast<uint16_t>(parts[j / 2] >> (j % 2 * 16));
    }
  }
};

// Writes positions [begin, end) of slots [first_slot, + slots) to the tile's activations. staged
// holds them from position begin / 8 * 8 on. Whole 16-byte pieces where all of a piece is ours: its
// other values may belong to a neighbouring CTA.
__device__ void store_staged(const uint16_t* staged, int pitch, int begin, int end, int first_slot,
                             int slots, __nv_bfloat16* activations) {
  const int first_piece = begin / 8, pieces = (end + 7) / 8 - first_piece;
  for (int i = threadIdx.x; i < pieces * slots; i += kThreads) {
    const int piece = first_piece + i % pieces, slot = i / pieces;
    const uint16_t* from = staged + slot * pitch + (i % pieces) * 8;
    const int row = first_slot + slot;
    auto* to = reinterpret_cast<uint16_t*>(activations) +
               piece / (kBlock / 8) * (kTileTokens * kBlock) + row * kBlock +
               ((piece % (kBlock / 8)) ^ (row % 8)) * 8;
    if (piece * 8 >= begin && piece * 8 + 8 <= end) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < 8; ++j) {
        if (piece * 8 + j >= begin && piece * 8 + j < end) to[j] = from[j];
      }
    }
  }
}

// Inclusive-to-exclusive prefix sums of the mask's bits by the first warp: before[i] = neurons of
// words below i. Returns the total, to the first warp.
__device__ int scan_mask(const uint32_t* mask, int words, int* before) {
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int base = 0; base < words; base += 32) {
    const int i = base + lane;
    const int count = i < words ? __popc(mask[i]) : 0;
    int through = count;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (i < words) before[i] = sum + through - count;
    sum += __shfl_sync(~0u, through, 31);
  }
  return sum;
}

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 4)
    build_unions_kernel(Gate gate, Tiles tiles) {
  namespace cg = cooperative_groups;
  const auto cluster = cg::this_cluster();
  extern __shared__ uint32_t shared[];
  __shared__ int32_t tokens[kTileTokens];
  __shared__ int sizes[kCluster];  // of the parts of the union
  // 36 KiB: an SM still holds the 4 CTAs that its threads allow.
  __shared__ alignas(16) uint16_t staged[kStaged];
  const int tile = tiles.counts->tiles - 1 - static_cast<int>(blockIdx.x) / kCluster;
  if (tile < 0) return;  // the whole cluster
  const int rank = static_cast<int>(cluster.block_rank());
  const int col_tiles = gate.col_tiles;
  const int share = (col_tiles + kCluster - 1) / kCluster;
  const int first = min(rank * share, col_tiles);
  const int count = min(share, col_tiles - first);
  const int words = count * (256 / 32), first_word = first * (256 / 32);
  uint32_t* mask = shared;                                            // [words] a bit per neuron
  int* before = reinterpret_cast<int*>(shared) + share * (256 / 32);  // [words]
  if (threadIdx.x < kTileTokens) {
    tokens[threadIdx.x] = tiles.tokens[tile * kTileTokens + threadIdx.x];
  }
  for (int i = threadIdx.x; i < words; i += kThreads) mask[i] = 0;
  cluster.barrier_arrive();

  __shared__ SpilledTiles spilled;
  const Pairs pairs{gate, tokens, first, count, &spilled};
  pairs.for_each(0, kTileTokens, MarkActive{mask, first_word});
  cluster.barrier_wait();  // all CTAs have started, so that their shared memory can be written
  if (threadIdx.x < 32) {
    const int size = scan_mask(mask, words, before);
    if (threadIdx.x < kCluster) *cluster.map_shared_rank(&sizes[rank], threadIdx.x) = size;
  }
  cluster.sync();
  int begin = 0, total = 0;
  for (int i = 0; i < kCluster; ++i) {
    if (i < rank) begin += sizes[i];
    total += sizes[i];
  }
  if (rank == 0 && threadIdx.x == 0) tiles.union_size[tile] = total;

  int32_t* ids = tiles.union_ids + int64_t{tile} * tiles.blocks * kBlock + begin;
  for (int i = threadIdx.x; i < words; i += kThreads) {
    int position = before[i];
    for (uint32_t left = mask[i]; left != 0; left &= left - 1) {
      ids[position++] = (first_word + i) * 32 + __ffs(left) - 1;
    }
  }
  // The last part also pads the union to whole blocks.
  const int end =
      rank == kCluster - 1 ? (total + kBlock - 1) / kBlock * kBlock : begin + sizes[rank];
  __nv_bfloat16* out = tiles.activations + int64_t{tile} * tiles.blocks * (kTileTokens * kBlock);
  const int lead = begin % 8;
  const int pitch = (lead + end - begin + 7) / 8 * 8;
  const int slots_at_once = min(kTileTokens, kStaged / max(pitch, 8));
  for (int slot = 0; end > begin && slot < kTileTokens; slot += slots_at_once) {
    const int slots = min(slots_at_once, kTileTokens - slot);
    for (int i = threadIdx.x; i < slots * pitch / 8; i += kThreads) {
      reinterpret_cast<uint4*>(staged)[i] = uint4{};
    }
    pairs.for_each(slot, slots,
                   StageValues{mask, before, first_word, staged + lead - slot * pitch, pitch});
    store_staged(staged, pitch, begin, end, slot, slots, out);
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_build_unions(const Gate& gate, const Tiles& tiles, cudaStream_t stream) {
  const int col_tiles = gate.col_tiles;
  const int share = (col_tiles + kCluster - 1) / kCluster;
  const int shared = share * (256 / 32) * 2 * 4;
  const cudaError_t status = cudaFuncSetAttribute(
      build_unions_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status != cudaSuccess) return status;
  build_unions_kernel<<<tiles.max_tiles * kCluster, kThreads, shared, stream>>>(gate, tiles);
  return cudaGetLastError();
}

}  // namespace twell::tile_union
