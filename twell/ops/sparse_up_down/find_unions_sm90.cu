// SPDX-License-Identifier: Apache-2.0
// Per tile of tokens: the union of its active neurons, a list of its non-zeros, and once all sizes
// are known the work lists of the two GEMMs. A few CTAs share the columns of a tile. The one that
// is done last numbers the neurons; the last one of all makes the lists.
#include <algorithm>
#include <cstdint>

#include "twell/ops/sparse_up_down/union_pieces_sm90.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::tile_union {
namespace {

constexpr int kThreads = 512;
constexpr int kCtasPerMultiprocessor = 3;
constexpr int kMinParts = 3, kMaxParts = 32;
// Threads with the same token take every kStride-th column tile, kAhead of them at a time.
constexpr int kStride = kThreads / kTileTokens;
constexpr int kAhead = 2;
// Sizes of unions that the schedule keeps at hand; of more tiles it reads them from memory.
constexpr int kCachedSizes = 2048;
// In a tile's word of `marked`: parts that are done, and their neurons below.
constexpr int kPartShift = 24;
static_assert(kMaxFfn < 1 << kPartShift);

struct Shared {
  int spilled;
  int neurons;
  int tile_neurons;  // of all parts where this one was the last, else -1
  // Spilled tiles of a batch: {column tile, spill slot}.
  int2 list[kThreads * kAhead];
  int32_t sizes[kCachedSizes];
};

__device__ __forceinline__ const uint4* tile_words(const Gate& gate, int token, int col_tile) {
  return reinterpret_cast<const uint4*>(gate.words +
                                        (int64_t{token} * gate.col_tiles + col_tile) * gate.slots);
}

// Of 128 tokens by 256 neurons.
struct ColumnTile {
  uint32_t* mask;     // [8], shared
  int* listed;        // shared
  uint32_t* entries;  // [kListed]

  // By a whole warp, each lane on a packed tile of its own or (non_zeros 0) none. head: words 0 ..
  // 3 of it, the count among them.
  __device__ __forceinline__ void add(const uint4* source, const uint4& head, int non_zeros,
                                      int slot) const {
    const int lane = threadIdx.x % 32;
    int through = non_zeros;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    const int total = __shfl_sync(~0u, through, 31);
    if (total == 0) return;
    int at = 0;
    if (lane == 0) at = atomicAdd(listed, total);
    at = __shfl_sync(~0u, at, 0) + through - non_zeros - 1;
    const auto entry = [&](int i, uint32_t word) {
      if (i > non_zeros) return;
      atomicOr(&mask[word / 32 % 8], 1u << (word % 32));
      if (at + i < kListed) {
        entries[at + i] = (word & 0xffff0000u) | static_cast<uint32_t>(slot) << 8 | (word & 0xff);
      }
    };
    entry(1, head.y);
    entry(2, head.z);
    entry(3, head.w);
#pragma unroll 1
    for (int i = 4; i <= non_zeros; i += 8) {
      const uint4 low = source[i / 4];
      const uint4 high = i + 4 <= non_zeros ? source[i / 4 + 1] : uint4{};
      entry(i, low.x);
      entry(i + 1, low.y);
      entry(i + 2, low.z);
      entry(i + 3, low.w);
      entry(i + 4, high.x);
      entry(i + 5, high.y);
      entry(i + 6, high.z);
      entry(i + 7, high.w);
    }
    __syncwarp();
  }
};

// Spilled tiles come in bunches; whole warps share them out, 8 values per lane.
__device__ __forceinline__ void mark_spilled(const Gate& gate, const Shared& shared,
                                             uint32_t* mask) {
  constexpr int kWarps = kThreads / 32, kInFlight = 4;
  const int lane = threadIdx.x % 32, tiles = shared.spilled;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < tiles; i += kWarps * kInFlight) {
    uint4 values[kInFlight] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int at = i + j * kWarps;
      if (at < tiles) values[j] = gate.spill[int64_t{shared.list[at].y} * 32 + lane];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int at = i + j * kWarps;
      if (at >= tiles) break;
      uint32_t bits = nonzero_bits(values[j]) << (lane % 4 * 8);
      bits |= __shfl_xor_sync(~0u, bits, 1);  // four lanes make one word
      bits |= __shfl_xor_sync(~0u, bits, 2);
      if (lane % 4 == 0 && bits != 0) atomicOr(&mask[shared.list[at].x * 8 + lane / 4], bits);
    }
  }
}

// Numbers the neurons of a tile whose mask is whole. scratch: scan_bytes.
__device__ void number_neurons(const Tiles& tiles, int tile, int words, uint32_t* scratch) {
  uint32_t* mask = scratch;
  int* before = reinterpret_cast<int*>(scratch) + words;
  const int64_t offset = int64_t{tile} * words;
  for (int i = threadIdx.x; i < words; i += kThreads) mask[i] = __ldcg(tiles.mask + offset + i);
  __syncthreads();
  if (threadIdx.x < 32) scan_mask(mask, words, before);
  __syncthreads();
  const int first_block = tile * tiles.blocks;
  if (threadIdx.x == 0) tiles.first_block[tile] = first_block;
  int32_t* ids = tiles.union_ids + int64_t{first_block} * kBlock;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < words; i += kThreads / 32) {
    const uint32_t word = mask[i];
    if (lane == 0) tiles.before[offset + i] = before[i];
    if (word >> lane & 1) ids[before[i] + __popc(word & ((1u << lane) - 1))] = i * 32 + lane;
  }
  __syncthreads();
}

__device__ void schedule(const Tiles& tiles, int ctas, ActivityCuda* activity, int32_t* sizes,
                         uint32_t* scratch) {
  const int count = tiles.counts->tiles;
  const bool cached = count <= kCachedSizes;
  for (int i = threadIdx.x; cached && i < count; i += kThreads) {
    sizes[i] = __ldcg(tiles.union_size + i);
  }
  __syncthreads();
  make_schedule<kThreads>(tiles, cached ? sizes : tiles.union_size, ctas, scratch, activity);
}

// A CTA on some columns of a tile, its work items one after the other.
struct PartFinder {
  const Gate& gate;
  const Tiles& tiles;
  const int ctas;
  ActivityCuda* activity;
  Shared& shared;
  uint32_t* scratch;
  const int slot = threadIdx.x % kTileTokens, first = threadIdx.x / kTileTokens;
  int tile = 0, parts = 0;
  Columns columns{0, 0, 1};
  uint4 heads[kAhead];

  __device__ __forceinline__ int place() const { return tile * kTileTokens + slot; }
  __device__ __forceinline__ int* listed() const {
    return reinterpret_cast<int*>(scratch) + columns.words();
  }
  __device__ __forceinline__ void load_heads(int token, int from) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = from + j * kStride;
      heads[j] =
          token >= 0 && i < columns.count ? *tile_words(gate, token, columns.first + i) : uint4{};
    }
  }
  __device__ __forceinline__ void begin(int tile_in, int part, int parts_in) {
    tile = tile_in;
    parts = parts_in;
    columns = Columns(gate.col_tiles, part, parts);
    for (int i = threadIdx.x; i < columns.words() + columns.count; i += kThreads) scratch[i] = 0;
    if (threadIdx.x == 0) {
      shared.spilled = 0;
      shared.neurons = 0;
    }
  }
  // The first heads are loaded. Starts with a barrier.
  __device__ __forceinline__ void find(int token) {
    uint32_t* mask = scratch;
    const int64_t first_column_tile = int64_t{tile} * gate.col_tiles + columns.first;
    uint32_t* entries = tiles.entries + first_column_tile * kListed;
    __syncthreads();
#pragma unroll 1
    for (int batch = 0; batch < columns.count; batch += kStride * kAhead) {
      if (batch > 0) load_heads(token, batch + first);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = batch + first + j * kStride;
        if (i >= columns.count) break;
        const bool spilled = token >= 0 && static_cast<int>(heads[j].x) >= gate.slots;
        if (spilled) {
          shared.list[atomicAdd(&shared.spilled, 1)] = int2{i, static_cast<int>(heads[j].y)};
          atomicAdd(listed() + i, kListed + 1);
        }
        __syncwarp();
        const ColumnTile column_tile{mask + i * 8, listed() + i, entries + int64_t{i} * kListed};
        column_tile.add(tile_words(gate, max(token, 0), columns.first + i), heads[j],
                        token >= 0 && !spilled ? static_cast<int>(heads[j].x) : 0, slot);
      }
      __syncthreads();
      mark_spilled(gate, shared, mask);
      __syncthreads();
      if (threadIdx.x == 0) shared.spilled = 0;
      __syncthreads();
    }
    for (int i = threadIdx.x; i < columns.count; i += kThreads) {
      tiles.listed[first_column_tile + i] = listed()[i];
    }
    const int words = gate.col_tiles * 8;
    uint32_t* out = tiles.mask + int64_t{tile} * words + columns.first_word();
    for (int i = threadIdx.x; i < columns.words(); i += kThreads) {
      out[i] = mask[i];
      atomicAdd(&shared.neurons, __popc(mask[i]));
      __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int before = atomicAdd(tiles.marked + tile, shared.neurons | 1 << kPartShift);
      const bool last = before >> kPartShift == parts - 1;
      shared.tile_neurons = last ? (before & ((1 << kPartShift) - 1)) + shared.neurons : -1;
      __threadfence();
    }
    __syncthreads();
    if (shared.tile_neurons < 0) return;
    const bool last = last_size(tiles, tile, shared.tile_neurons);
    number_neurons(tiles, tile, words, scratch);
    if (last) schedule(tiles, ctas, activity, shared.sizes, scratch);
  }
};

// The first CTAs take the plain tiles, `parts` each; the others go over the heavy ones, which take
// longer, heavy_parts each.
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor)
    find_unions_kernel(Gate gate, Tiles tiles, int parts, int heavy_parts, int ctas,
                       ActivityCuda* activity) {
  extern __shared__ uint32_t scratch[];
  __shared__ Shared shared;
  sm90::allow_next_kernel();
  PartFinder finder{gate, tiles, ctas, activity, shared, scratch};
  const int plain_tiles = (gate.rows + kTileTokens - 1) / kTileTokens;
  const int index = blockIdx.x, plain_ctas = plain_tiles * parts;
  if (index < plain_ctas) {
    finder.begin(index / parts, index % parts, parts);
    // The gate is complete since the kernel in front let this one start; only which rows are heavy
    // has to be waited for.
    finder.load_heads(finder.place() < gate.rows ? finder.place() : -1, finder.first);
    sm90::wait_for_previous_kernel();
    finder.find(tiles.tokens[finder.place()]);
    return;
  }
  sm90::wait_for_previous_kernel();
  const int items = (tiles.counts->tiles - plain_tiles) * heavy_parts;
  for (int item = index - plain_ctas; item < items;
       item += static_cast<int>(gridDim.x) - plain_ctas) {
    finder.begin(plain_tiles + item / heavy_parts, item % heavy_parts, heavy_parts);
    const int token = tiles.tokens[finder.place()];
    finder.load_heads(token, finder.first);
    finder.find(token);
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_find_unions(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                               int ctas, cudaStream_t stream) {
  const int plain_tiles = (gate.rows + kTileTokens - 1) / kTileTokens;
  const int wave = kCtasPerMultiprocessor * ctas;
  const int parts = std::clamp(wave / plain_tiles, kMinParts, kMaxParts);
  const int heavy_parts = std::clamp((gate.col_tiles + 1) / 2, kMinParts, kMaxParts);
  const int heavy_ctas = std::min((tiles.max_tiles - plain_tiles) * heavy_parts, wave / 2);
  const int bytes = std::max(scan_bytes(gate), (tiles.blocks + 1) * 4);
  const cudaError_t status =
      cudaFuncSetAttribute(find_unions_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(find_unions_kernel, dim3(plain_tiles * parts + heavy_ctas),
                                kThreads, bytes, stream, gate, tiles, parts, heavy_parts, ctas,
                                activity);
}

}  // namespace twell::tile_union
