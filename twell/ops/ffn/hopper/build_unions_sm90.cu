// SPDX-License-Identifier: Apache-2.0
// Per tile of tokens: the union of its active neurons, and its activations compacted onto it, in
// two kernels. In both, kParts CTAs share the columns of a tile: the first marks what fires in a
// mask in global memory; in the second each CTA reads the whole mask of its tile, a bit per neuron,
// and so knows where its part of the union begins.
#include <algorithm>
#include <cstdint>

#include "twell/ops/ffn/hopper/schedule_sm90.cuh"
#include "twell/ops/ffn/tile_union.h"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::tile_union {
namespace {

constexpr int kThreads = 512;
// Values that a CTA stages. 36 KiB: an SM still holds the 4 CTAs that its threads allow.
constexpr int kStaged = 18432;
constexpr int kCtasPerMultiprocessor = 4;
constexpr int kMinParts = 8, kMaxParts = 32;
static_assert(kMaxFfn <= kMaxParts * kStaged);

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

// Second pass: the values of some slots whose neuron's position in the union is one of `pitch` from
// `first` on, into a staging buffer of `pitch` values per slot.
struct StageValues {
  const uint32_t* mask;
  const int* before;  // neurons of the union in words below
  int first;
  uint16_t* staged;  // of slot 0
  int pitch;

  __device__ void entry(int slot, int column, uint32_t bits) const {
    const int i = column / 32;
    const int position = before[i] - first + __popc(mask[i] & ((1u << (column % 32)) - 1));
    if (static_cast<uint32_t>(position) < static_cast<uint32_t>(pitch)) {
      staged[slot * pitch + position] = static_cast<uint16_t>(bits);
    }
  }
  __device__ void eight(int slot, int column, const uint4& values) const {
    const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
    const int i = column / 32;
    const uint32_t word = mask[i];
    int position = before[i] - first + __popc(word & ((1u << (column % 32)) - 1));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if ((word >> (column % 32 + j) & 1) == 0) continue;
      if (static_cast<uint32_t>(position) < static_cast<uint32_t>(pitch)) {
        staged[slot * pitch + position] = static_cast<uint16_t>(parts[j / 2] >> (j % 2 * 16));
      }
      ++position;
    }
  }
};

// Writes the staged values of some slots, positions [first, first + pitch), to the tile's
// activations.
__device__ void store_staged(const uint16_t* staged, int pitch, int first, int first_slot,
                             int slots, __nv_bfloat16* activations) {
  const int pieces = pitch / 8;
  for (int i = threadIdx.x; i < pieces * slots; i += kThreads) {
    const int piece = first / 8 + i % pieces, row = first_slot + i / pieces;
    auto* to = reinterpret_cast<uint4*>(activations) +
               (piece / (kBlock / 8) * kTileTokens + row) * (kBlock / 8) +
               ((piece % (kBlock / 8)) ^ (row % 8));
    *to = reinterpret_cast<const uint4*>(staged)[i];
  }
}

// Which part of which tile a CTA works on. The last tiles, of heavy rows, take longest and start
// first.
struct Assignment {
  int tile, rank, parts;  // tile < 0: none

  __device__ Assignment(const Tiles& tiles, int parts_in)
      : tile(tiles.counts->tiles - 1 - static_cast<int>(blockIdx.x) / parts_in),
        rank(static_cast<int>(blockIdx.x) % parts_in),
        parts(parts_in) {}
};

__device__ void load_tokens(const Tiles& tiles, int tile, int32_t* tokens) {
  if (threadIdx.x < kTileTokens) {
    tokens[threadIdx.x] = tiles.tokens[tile * kTileTokens + threadIdx.x];
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    mark_unions_kernel(Gate gate, Tiles tiles, int parts) {
  extern __shared__ uint32_t mask[];  // [words of this part]
  __shared__ int32_t tokens[kTileTokens];
  __shared__ SpilledTiles spilled;
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  const Assignment work(tiles, parts);
  if (work.tile < 0) return;
  const Columns columns(gate.col_tiles, work.rank, work.parts);
  load_tokens(tiles, work.tile, tokens);
  for (int i = threadIdx.x; i < columns.words(); i += kThreads) mask[i] = 0;
  const Pairs pairs{gate, tokens, columns.first, columns.count, &spilled};
  pairs.for_each(0, kTileTokens, MarkActive{mask, columns.first_word()});
  uint32_t* out = tiles.mask + int64_t{work.tile} * gate.col_tiles * 8 + columns.first_word();
  int neurons = 0;
  for (int i = threadIdx.x; i < columns.words(); i += kThreads) {
    out[i] = mask[i];
    neurons += __popc(mask[i]);
  }
  if (!tiles.compact) return;
  neurons = __reduce_add_sync(~0u, neurons);
  if (threadIdx.x % 32 == 0 && neurons > 0) atomicAdd(&tiles.union_size[work.tile], neurons);
}

// Blocks of the tiles before this one, to all threads.
__device__ int blocks_before(const Tiles& tiles, int tile) {
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  int blocks = 0;
  for (int i = threadIdx.x; i < tile; i += kThreads) blocks += blocks_of(tiles.union_size[i]);
  blocks = __reduce_add_sync(~0u, blocks);
  if (threadIdx.x % 32 == 0 && blocks > 0) atomicAdd(&sum, blocks);
  __syncthreads();
  return sum;
}

// Column tiles that have a neuron at positions [begin, end) of the union.
struct TileRange {
  int first, last;  // shared; none when last < first

  __device__ void find(const int* before, int col_tiles, int begin, int end) {
    if (threadIdx.x == 0) {
      first = col_tiles;
      last = -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < col_tiles; i += kThreads) {
      const int from = before[i * 8], to = before[i * 8 + 8];
      if (from < to && from < end && to > begin) {
        atomicMin(&first, i);
        atomicMax(&last, i);
      }
    }
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kThreads, 4)
    build_unions_kernel(Gate gate, Tiles tiles, ActivityCuda* activity, int ctas, int parts,
                        Condition condition) {
  extern __shared__ uint32_t shared[];
  __shared__ int32_t tokens[kTileTokens];
  __shared__ alignas(16) uint16_t staged[kStaged];
  __shared__ SpilledTiles spilled;
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  if (condition != nullptr && *condition == 0) return;
  const Assignment work(tiles, parts);
  const int tile = work.tile;
  if (tile < 0) return;
  const int words = gate.col_tiles * 8;
  uint32_t* mask = shared;                               // [words] a bit per neuron
  int* before = reinterpret_cast<int*>(shared) + words;  // [words + 1] neurons of words below
  load_tokens(tiles, tile, tokens);
  for (int i = threadIdx.x; i < words; i += kThreads) {
    mask[i] = tiles.mask[int64_t{tile} * words + i];
  }
  __syncthreads();
  if (threadIdx.x < 32) scan_mask(mask, words, before);
  __syncthreads();
  const int total = before[words];
  const int first_block = tiles.compact ? blocks_before(tiles, tile) : tile * tiles.blocks;
  if (work.rank == 0 && condition == nullptr) {
    if (threadIdx.x == 0) tiles.first_block[tile] = first_block;
    if (tiles.before != nullptr) {
      for (int i = threadIdx.x; i < words; i += kThreads) {
        tiles.before[int64_t{tile} * words + i] = before[i];
      }
    }
    if (last_size(tiles, tile, total)) {
      make_schedule<kThreads>(tiles, tiles.union_size, ctas, reinterpret_cast<uint32_t*>(staged),
                              activity);
      __syncthreads();
    }
  }

  // The union is padded to whole blocks.
  const int padded = (total + kBlock - 1) / kBlock * kBlock;
  const int share = (padded / 8 + work.parts - 1) / work.parts * 8;
  const int begin = min(work.rank * share, padded), pitch = min(share, padded - begin);
  if (pitch == 0) return;
  int32_t* ids = tiles.union_ids + int64_t{first_block} * kBlock;
  for (int i = threadIdx.x; i < words; i += kThreads) {
    int position = before[i];
    if (position >= begin + pitch || before[i + 1] <= begin) continue;
    for (uint32_t left = mask[i]; left != 0; left &= left - 1) {
      if (position >= begin && position < begin + pitch) ids[position] = i * 32 + __ffs(left) - 1;
      ++position;
    }
  }
  __nv_bfloat16* out = tiles.activations + int64_t{first_block} * (kTileTokens * kBlock);
  const int slots_at_once = min(kTileTokens, kStaged / pitch);
  __shared__ TileRange range;
  range.find(before, gate.col_tiles, begin, begin + pitch);
  const Pairs pairs{gate, tokens, range.first, max(range.last + 1 - range.first, 0), &spilled};
  for (int slot = 0; slot < kTileTokens; slot += slots_at_once) {
    const int slots = min(slots_at_once, kTileTokens - slot);
    for (int i = threadIdx.x; i < slots * pitch / 8; i += kThreads) {
      reinterpret_cast<uint4*>(staged)[i] = uint4{};
    }
    pairs.for_each(slot, slots, StageValues{mask, before, begin, staged - slot * pitch, pitch});
    store_staged(staged, pitch, begin, slot, slots, out);
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_build_unions(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                                int ctas, cudaStream_t stream, Condition condition) {
  // As many parts as make a wave of CTAs, and enough for a part to stage one token's values.
  const int wave = kCtasPerMultiprocessor * ctas;
  const int fill = std::clamp((wave + tiles.max_tiles - 1) / tiles.max_tiles, kMinParts, kMaxParts);
  const int parts = std::max(fill, (tiles.blocks * kBlock + kStaged - 1) / kStaged);
  const dim3 grid(tiles.max_tiles * parts);
  const int mark_bytes = (gate.col_tiles + kMinParts - 1) / kMinParts * 8 * 4;
  cudaError_t status = cudaSuccess;
  if (condition == nullptr) {
    status = sm90::launch_dependent(mark_unions_kernel, grid, kThreads, mark_bytes, stream, gate,
                                    tiles, parts);
  }
  if (status != cudaSuccess) return status;
  const int build_bytes = scan_bytes(gate);
  status = cudaFuncSetAttribute(build_unions_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                build_bytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(build_unions_kernel, grid, kThreads, build_bytes, stream, gate,
                                tiles, activity, ctas, parts, condition);
}

}  // namespace twell::tile_union
