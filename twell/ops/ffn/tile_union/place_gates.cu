// SPDX-License-Identifier: Apache-2.0
// place_gates: the gate compacted onto unions that find_unions found: the image of each tile in
// global memory, and the list of its neurons. For training, whose kernels read these images, and
// for layers without a gate, where the image is h.
#include <algorithm>
#include <climits>
#include <cstdint>

#include "twell/format/twell_reader.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union {
namespace {

constexpr int kPlaceThreads = 512;
// Values that a CTA stages in shared memory. With these 36 KiB an SM still holds the 4 CTAs that
// its threads allow.
constexpr int kStaged = 18432;
constexpr int kPlaceCtasPerSm = 4;
constexpr int kMinPlaceParts = 8, kMaxPlaceParts = 32;
static_assert(kMaxFfn <= kMaxPlaceParts * kStaged);

// Spilled tiles of a batch of pairs. Whole warps read them together, because they come in bunches
// and a warp that met many would delay the others.
struct SpilledTiles {
  int count[2];              // of even and odd batches
  int2 list[kPlaceThreads];  // {slot | column tile << 8, spill slot}
};

// The (token, column tile) pairs of one CTA: the tokens of its tile, times a range of column tiles.
struct Pairs {
  Gate gate;
  const int32_t* tokens;  // [kTileTokens], shared
  int first, count;       // column tiles
  SpilledTiles* spilled;  // shared

  // For the given slots: one thread each calls visit.entry(slot, column, bf16 bits) for non-zeros
  // of packed tiles, and whole warps call visit.eight(slot, first column, values) for spilled
  // tiles. Starts and ends with a barrier of the CTA.
  template <typename Visit>
  __device__ void for_each(int first_slot, int slot_count, const Visit& visit) const {
    const int pairs = slot_count * count;
    if (threadIdx.x < 2) spilled->count[threadIdx.x] = 0;
    __syncthreads();
    for (int base = 0, batch = 0; base < pairs; base += kPlaceThreads, batch ^= 1) {
      const int index = base + static_cast<int>(threadIdx.x);
      const int slot = first_slot + index / count, col_tile = first + index % count;
      const int token = index < pairs ? tokens[slot] : -1;
      if (token >= 0) {
        const uint4* source = twell_reader::tile_quads(gate, token, col_tile);
        const uint4 head = source[0];
        if (!twell_reader::is_spilled(gate, static_cast<int>(head.x))) {
          packed(source, head, slot, col_tile, visit);
        } else {
          spilled->list[atomicAdd(&spilled->count[batch], 1)] =
              int2{slot | col_tile << 8, static_cast<int>(head.y)};
        }
      }
      __syncthreads();
      read_spilled(spilled->count[batch], visit);
      __syncthreads();
      if (threadIdx.x == 0) spilled->count[batch] = 0;  // reset for the batch after the next
    }
  }

 private:
  // head: words 0 .. 3; word 0 is the count.
  template <typename Visit>
  __device__ static void packed(const uint4* source, const uint4& head, int slot, int col_tile,
                                const Visit& visit) {
    const int non_zeros = static_cast<int>(head.x);
    const auto entry = [&](int i, uint32_t word) {
      if (i <= non_zeros) {
        visit.entry(slot, col_tile * 256 + static_cast<int>(twell_reader::column(word)),
                    twell_reader::bf16_bits(word));
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
      return i < tiles ? twell_reader::spilled_values(gate, spilled->list[i].y)[lane] : uint4{};
    };
    uint4 next = load(threadIdx.x / 32);
    for (int i = threadIdx.x / 32; i < tiles; i += kPlaceThreads / 32) {
      const uint4 values = next;
      next = load(i + kPlaceThreads / 32);
      const int tile = spilled->list[i].x;
      visit.eight(tile & 0xff, (tile >> 8) * 256 + lane * 8, values);
    }
  }
};

// The bits of g, or of g^2 rounded to bf16, for the bits of g.
__device__ __forceinline__ uint16_t placed(uint32_t bits, bool squared) {
  if (!squared) return static_cast<uint16_t>(bits);
  const float g = __uint_as_float(bits << 16);
  return __bfloat16_as_ushort(__float2bfloat16(g * g));
}

// Stages the values of some slots whose neurons have positions [first, first + pitch) in the union.
struct StageValues {
  const uint32_t* mask;
  const int* before;  // neurons in words below
  int first;
  uint16_t* staged;  // [slots, pitch], from slot 0
  int pitch;
  bool squared;

  __device__ void entry(int slot, int column, uint32_t bits) const {
    const int i = column / 32;
    const int position = before[i] - first + __popc(mask[i] & ((1u << (column % 32)) - 1));
    if (static_cast<uint32_t>(position) < static_cast<uint32_t>(pitch)) {
      staged[slot * pitch + position] = placed(bits, squared);
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
        staged[slot * pitch + position] = placed(parts[j / 2] >> (j % 2 * 16) & 0xffff, squared);
      }
      ++position;
    }
  }
};

// Copies staged values to the tile's image.
__device__ void store_staged(const uint16_t* staged, int pitch, int first, int first_slot,
                             int slots, __nv_bfloat16* activations) {
  const int pieces = pitch / 8;
  for (int i = threadIdx.x; i < pieces * slots; i += kPlaceThreads) {
    const int piece = first / 8 + i % pieces, row = first_slot + i / pieces;
    auto* to = reinterpret_cast<uint4*>(activations) +
               (piece / (kBlock / 8) * kTileTokens + row) * (kBlock / 8) +
               ((piece % (kBlock / 8)) ^ (row % 8));
    *to = reinterpret_cast<const uint4*>(staged)[i];
  }
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
    for (int i = threadIdx.x; i < col_tiles; i += kPlaceThreads) {
      const int from = before[i * 8], to = before[i * 8 + 8];
      if (from < to && from < end && to > begin) {
        atomicMin(&first, i);
        atomicMax(&last, i);
      }
    }
    __syncthreads();
  }
};

// `parts` CTAs share the positions of a tile's union. Tiles of heavy rows, the last ones, take
// longest and start first.
__global__ void __launch_bounds__(kPlaceThreads,
                                  std::min(kPlaceCtasPerSm, gpu::kSmThreads / kPlaceThreads))
    place_gates_kernel(Gate gate, Tiles tiles, int parts, Condition condition) {
  extern __shared__ uint32_t mask[];  // [words] a bit per neuron of the union
  __shared__ int32_t tokens[kTileTokens];
  __shared__ alignas(16) uint16_t staged[kStaged];
  __shared__ SpilledTiles spilled;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  if (condition != nullptr && *condition == 0) return;
  const int tile = tiles.counts->tiles - 1 - static_cast<int>(blockIdx.x) / parts;
  const int part = static_cast<int>(blockIdx.x) % parts;
  if (tile < 0) return;
  const int words = gate.col_tiles * 8, total = tiles.union_size[tile];
  const int first_block = tiles.first_block[tile];
  int* before = reinterpret_cast<int*>(mask) + words;  // [words + 1] neurons in words below
  if (threadIdx.x < kTileTokens) {
    tokens[threadIdx.x] = tiles.tokens[tile * kTileTokens + threadIdx.x];
  }
  for (int i = threadIdx.x; i < words; i += kPlaceThreads) {
    mask[i] = tiles.mask[int64_t{tile} * words + i];
    before[i] = static_cast<int>(tiles.before[int64_t{tile} * words + i]);
  }
  if (threadIdx.x == 0) before[words] = total;
  __syncthreads();

  // The union is padded to whole blocks.
  const int padded = (total + kBlock - 1) / kBlock * kBlock;
  const int share = (padded / 8 + parts - 1) / parts * 8;
  const int begin = min(part * share, padded), pitch = min(share, padded - begin);
  if (pitch == 0) return;
  int32_t* ids = tiles.union_ids + int64_t{first_block} * kBlock;
  for (int i = threadIdx.x; i < words; i += kPlaceThreads) {
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
    for (int i = threadIdx.x; i < slots * pitch / 8; i += kPlaceThreads) {
      reinterpret_cast<uint4*>(staged)[i] = uint4{};
    }
    pairs.for_each(slot, slots,
                   StageValues{mask, before, begin, staged - slot * pitch, pitch, gate.squared});
    store_staged(staged, pitch, begin, slot, slots, out);
    __syncthreads();
  }
}

cudaError_t launch(const Gate& gate, const Tiles& tiles, int ctas, cudaStream_t stream,
                   Condition condition) {
  // Enough parts to fill the SMs, and for a part's values of one token to fit into kStaged.
  const int wave = kPlaceCtasPerSm * ctas;
  const int fill =
      std::clamp((wave + tiles.max_tiles - 1) / tiles.max_tiles, kMinPlaceParts, kMaxPlaceParts);
  const int parts = std::max(fill, (tiles.blocks * kBlock + kStaged - 1) / kStaged);
  const int bytes = (gate.col_tiles * 8 * 2 + 1) * 4;
  const cudaError_t status = gpu::allow_most_shared_memory(place_gates_kernel);
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(place_gates_kernel, dim3(tiles.max_tiles * parts), kPlaceThreads,
                               bytes, stream, gate, tiles, parts, condition);
}

}  // namespace

cudaError_t launch_place_gates(const Gate& gate, const Tiles& tiles, int ctas, cudaStream_t stream,
                               Condition condition) {
  return launch(gate, tiles, ctas, stream, condition);
}

}  // namespace twell::tile_union
