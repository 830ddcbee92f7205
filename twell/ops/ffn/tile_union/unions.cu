// SPDX-License-Identifier: Apache-2.0
// find_unions: per tile of 128 tokens, the union of its active neurons, for inference and for
// training. A CTA processes one tile, or a part of its columns where there are few tiles; the one
// that finishes a tile last numbers its neurons. The CTA that finishes last orders the tiles for
// down. Three variants of one kernel:
//   kListing     for up with a gate: also writes a list of the tile's non-zeros, and work items for
//                up as soon as a tile is found. It starts on SMs that the gate GEMM leaves idle,
//                and takes each tile as soon as its gate is packed.
//   kCompact     in front of place_gates: the blocks of a tile follow those of the tile before it.
//   kCandidates  for gate_up: of the candidates of a screen, which are bits, not TwELL; with work
//                items like kListing, without a list.
#include <algorithm>
#include <climits>
#include <cstdint>

#include "twell/format/activity_cuda.h"
#include "twell/format/twell_reader.cuh"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/gpu/sync.cuh"
#include "twell/ops/ffn/tile_union/tile_union_kernels.h"

namespace twell::tile_union {
namespace {

using gpu::block_scan;

enum class Variant { kListing, kCompact, kCandidates };

// --- Work lists of the GEMMs that follow ---

__device__ __forceinline__ int blocks_of(int neurons) { return (neurons + kBlock - 1) / kBlock; }

// Counting sort of the tiles by number of blocks, largest first, so that the last wave of a
// persistent GEMM consists of small items. Called by one CTA. sizes: union sizes, in any memory.
// buckets: [blocks + 1] in shared memory, by falling size. scratch: one int per warp. Ends with a
// barrier.
template <int Threads>
__device__ void order_tiles(const Tiles& tiles, const int32_t* sizes, int count, uint32_t* buckets,
                            int* scratch) {
#pragma unroll 1
  for (int i = threadIdx.x; i <= tiles.blocks; i += Threads) buckets[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int tile = threadIdx.x; tile < count; tile += Threads) {
    atomicAdd(&buckets[tiles.blocks - blocks_of(sizes[tile])], 1u);
  }
  __syncthreads();
  int base = 0;
  for (int first = 0; first <= tiles.blocks; first += Threads) {
    const int i = first + threadIdx.x;
    const int value = i <= tiles.blocks ? static_cast<int>(buckets[i]) : 0;
    int total;
    const int before = block_scan<Threads>(value, scratch, total);
    if (i <= tiles.blocks) buckets[i] = base + before;
    base += total;
  }
  __syncthreads();
  // The order within a bucket is arbitrary: it decides which CTA computes a tile, not its result.
#pragma unroll 1
  for (int tile = threadIdx.x; tile < count; tile += Threads) {
    tiles.order[atomicAdd(&buckets[tiles.blocks - blocks_of(sizes[tile])], 1u)] = tile;
  }
  __syncthreads();
}

// One CTA adds the unions of a call, of candidates or of active neurons, to activity. scratch: one
// int per warp in shared memory.
template <int Threads, bool Candidates>
__device__ void count_unions(const int32_t* sizes, int count, ActivityCuda* activity,
                             int* scratch) {
  if (activity == nullptr) return;
  unsigned long long sum = 0;
  int largest = 0;
  for (int tile = threadIdx.x; tile < count; tile += Threads) {
    sum += sizes[tile];
    largest = max(largest, sizes[tile]);
  }
  if constexpr (Candidates) {
    if (sum > 0) atomicAdd(&activity->candidate_union_neurons, sum);
    if (threadIdx.x == 0) {
      atomicAdd(&activity->candidate_unions, static_cast<unsigned long long>(count));
    }
    return;
  }
  if (sum > 0) atomicAdd(&activity->union_neurons, sum);
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll 1  // unrolled it makes the kernel spill registers
  for (int warp = 1; warp < Threads / 32; ++warp) largest = max(largest, scratch[warp]);
  atomicAdd(&activity->unions, static_cast<unsigned long long>(count));
  atomicAdd(&activity->union_calls, 1ull);
  atomicAdd(&activity->largest_union, static_cast<unsigned long long>(largest));
}

// One of `chunks` chunks of a tile's blocks, in the format of up's work items.
__device__ __forceinline__ int2 up_item(int tile, int blocks, int chunk, int chunks) {
  const int begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
  return int2{tile, begin | (end - begin) << 16};
}

// Number of work items of up for a union: as few as possible, but enough for all SMs.
__device__ __forceinline__ int chunks_of(const Tiles& tiles, int neurons) {
  const int blocks = blocks_of(neurons);
  return max((blocks + tiles.chunk_blocks - 1) / tiles.chunk_blocks, min(blocks, tiles.spread));
}

// Value of a tile's word in `marked` once its work items are added.
constexpr int kHasItems = -1;

// Writes every step-th item of a tile, from `chunk` on, to up's list at index at + chunk. A CTA
// that sees one item sees all outputs of its tile.
__device__ __forceinline__ void add_items(const Tiles& tiles, int tile, int neurons, int at,
                                          int chunk, int step) {
  const int chunks = chunks_of(tiles, neurons);
  __threadfence();
  for (; chunk < chunks; chunk += step) {
    gpu::store_relaxed(tiles.up_items + at + chunk,
                       up_item(tile, blocks_of(neurons), chunk, chunks));
  }
}

// One CTA adds the items of all tiles that have none yet, in order of size. Returns the number of
// items in all.
template <int Threads>
__device__ int add_other_items(const Tiles& tiles, const int32_t* sizes, int count, int* scratch) {
  int items = __ldcg(&tiles.counts->up_items);
  for (int base = 0; base < count; base += Threads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const int tile = i < count ? tiles.order[i] : -1;
    const bool missing = tile >= 0 && __ldcg(tiles.marked + tile) != kHasItems;
    int total;
    const int at =
        items + block_scan<Threads>(missing ? chunks_of(tiles, sizes[tile]) : 0, scratch, total);
    if (missing) add_items(tiles, tile, sizes[tile], at, 0, 1);
    items += total;
  }
  return items;
}

// One CTA writes where each tile's blocks begin, so that they follow those of the tile before it.
template <int Threads>
__device__ void place_blocks(const Tiles& tiles, const int32_t* sizes, int count, int* scratch) {
  int blocks = 0;
  for (int base = 0; base < count; base += Threads) {
    const int tile = base + static_cast<int>(threadIdx.x);
    int total;
    const int before =
        block_scan<Threads>(tile < count ? blocks_of(sizes[tile]) : 0, scratch, total);
    if (tile < count) tiles.first_block[tile] = blocks + before;
    blocks += total;
  }
}

// --- A column tile: 128 tokens by 256 neurons ---

// Bit j is set if value j of eight bf16 values is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(const uint4& values) {
  const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    bits |= ((parts[j] & 0x7fff) != 0) << (2 * j) | ((parts[j] & 0x7fff0000) != 0) << (2 * j + 1);
  }
  return bits;
}

// The column tiles of one part of a tile.
struct Columns {
  int first, count;
  __device__ Columns(int col_tiles, int part, int parts) {
    const int share = (col_tiles + parts - 1) / parts;
    first = min(part * share, col_tiles);
    count = min(share, col_tiles - first);
  }
  __device__ int first_word() const { return first * (256 / 32); }
  __device__ int words() const { return count * (256 / 32); }
};

// Adds the packed activations of a column tile to the tile's union and, with Listing, to its list
// of non-zeros.
template <bool Listing>
struct ColumnTile {
  uint32_t* mask;     // [8], shared
  int* listed;        // shared; with Listing
  uint32_t* entries;  // [kListed]; with Listing

  // A whole warp calls it, each lane with a packed tile of its own, or with none (non_zeros 0).
  // head: words 0 .. 3, the count included; next: the four words behind, where there are that many.
  __device__ __forceinline__ void add(const uint4* source, const uint4& head, const uint4& next,
                                      int non_zeros, int slot) const {
    int at = 0;
    if constexpr (Listing) {
      const int lane = threadIdx.x % 32;
      int through = non_zeros;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, through, step);
        if (lane >= step) through += other;
      }
      const int total = __shfl_sync(~0u, through, 31);
      if (total == 0) return;
      if (lane == 0) at = atomicAdd(listed, total);
      at = __shfl_sync(~0u, at, 0) + through - non_zeros - 1;
    }
    const auto entry = [&](int i, uint32_t word) {
      if (i > non_zeros) return;
      atomicOr(&mask[twell_reader::mask_word(word)], 1u << twell_reader::mask_bit(word));
      if constexpr (Listing) {
        if (at + i < kListed) {
          entries[at + i] =
              (word & 0xffff0000u) | static_cast<uint32_t>(slot) << 8 | twell_reader::column(word);
        }
      }
    };
    entry(1, head.y);
    entry(2, head.z);
    entry(3, head.w);
    entry(4, next.x);
    entry(5, next.y);
    entry(6, next.z);
    entry(7, next.w);
#pragma unroll 1
    for (int i = 8; i <= non_zeros; i += 8) {
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

// Marks the neurons of spilled tiles. These come in bunches, so all warps share them, 8 values per
// lane.
template <int Threads>
__device__ __forceinline__ void mark_spilled(const Gate& gate, const int2* list, int tiles,
                                             uint32_t* mask) {
  constexpr int kWarps = Threads / 32, kInFlight = 8;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < tiles; i += kWarps * kInFlight) {
    uint4 values[kInFlight] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int at = i + j * kWarps;
      if (at < tiles) values[j] = twell_reader::spilled_values(gate, list[at].y)[lane];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int at = i + j * kWarps;
      if (at >= tiles) break;
      uint32_t bits = nonzero_bits(values[j]) << (lane % 4 * 8);
      bits |= __shfl_xor_sync(~0u, bits, 1);  // four lanes make one word
      bits |= __shfl_xor_sync(~0u, bits, 2);
      if (lane % 4 == 0 && bits != 0) atomicOr(&mask[list[at].x * 8 + lane / 4], bits);
    }
  }
}

// --- Heavy rows ---

// Heavy rows get tiles of their own. A tile's CTA compares its 128 rows with their own mean, so
// that it need not wait for other tiles. Once all plain tiles are judged, the heavy rows form tiles
// in row order.
struct HeavyRows {
  int sums[kTileTokens / 32];
  int32_t tokens[kTileTokens];  // rows of a heavy tile, or -1
  int scan[32];

  // Called by a CTA in which each group of kTileTokens threads holds the non-zeros of the tile's
  // rows. True where this thread's row is heavy. Starts with a barrier. Candidates are no
  // non-zeros, so activity does not count them.
  template <bool Candidates>
  __device__ __forceinline__ bool judge(const Gate& gate, int tile, int nnz,
                                        ActivityCuda* activity) {
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (warp < kTileTokens / 32) {
      const int sum = __reduce_add_sync(~0u, nnz), most = __reduce_max_sync(~0u, nnz);
      if (threadIdx.x % 32 == 0) {
        sums[warp] = sum;
        if (!Candidates && activity != nullptr) {
          atomicAdd(&activity->nnz, static_cast<unsigned long long>(sum));
          atomicMax(&activity->max_row_nnz, static_cast<unsigned long long>(most));
        }
      }
    }
    __syncthreads();
    const int rows = min(gate.rows - tile * kTileTokens, kTileTokens);
    if (activity != nullptr && threadIdx.x == 0) {
      atomicAdd(&activity->tokens, static_cast<unsigned long long>(rows));
    }
    if (gate.rows <= kTileTokens) return false;  // rows of a single tile are not set apart
    int total = 0;
    for (const int sum : sums) total += sum;
    return nnz > max(kHeavyFactor * total / rows, kHeavyFloor);
  }

  // Called by a CTA of `Threads` once all plain tiles are judged: writes the rows of heavy tile
  // `index` into tokens. Returns the number of heavy rows in all. Starts and ends with a barrier.
  template <int Threads>
  __device__ int gather(const Tiles& tiles, int plain_tiles, int index) {
    const int begin = index * kTileTokens;
    int all = 0;
    __syncthreads();
    if (threadIdx.x < kTileTokens) tokens[threadIdx.x] = -1;
    for (int first = 0; first < plain_tiles; first += Threads) {
      const int tile = first + static_cast<int>(threadIdx.x);
      const uint4 mask = tile < plain_tiles ? tiles.heavy[tile] : uint4{};
      const uint32_t words[4] = {mask.x, mask.y, mask.z, mask.w};
      int rows = 0, total;
      for (const uint32_t word : words) rows += __popc(word);
      int rank = all + block_scan<Threads>(rows, scan, total) - begin;
      all += total;
      if (rows == 0 || rank >= kTileTokens || rank + rows <= 0) continue;
      for (int i = 0; i < 4; ++i) {
        for (uint32_t left = words[i]; left != 0; left &= left - 1, ++rank) {
          if (rank < 0 || rank >= kTileTokens) continue;
          tokens[rank] = tile * kTileTokens + i * 32 + __ffs(left) - 1;
        }
      }
    }
    __syncthreads();
    return all;
  }
};

// --- The kernel ---

constexpr int kThreads = 512;
constexpr int kCtasPerMultiprocessor = 2;
constexpr int kMaxParts = 32;
// Threads with the same token take every kStride-th column tile and load kAhead of them at a time.
constexpr int kStride = kThreads / kTileTokens;
constexpr int kAhead = 3;
// Union sizes that the schedule caches in shared memory; with more tiles it reads them from global
// memory.
constexpr int kCachedSizes = 2048;

struct Shared {
  int spilled[2];  // spilled tiles of even and of odd batches
  int item, first_item;
  bool last;
  HeavyRows heavy;
  // Spilled tiles of a batch: {column tile, spill slot}.
  int2 list[kThreads * kAhead];
  int32_t sizes[kCachedSizes];
};

// A CTA that processes parts (column ranges) of tiles, one work item after the other.
template <Variant kVariant>
struct PartFinder {
  static constexpr bool kCandidates = kVariant == Variant::kCandidates;
  static constexpr bool kItems =
      kVariant != Variant::kCompact;  // work items as soon as a tile is found

  const Gate& gate;
  const Tiles& tiles;
  ActivityCuda* activity;
  const int ctas;                      // CTAs of up
  const int plain_parts, heavy_parts;  // parts of a plain tile and of a heavy one
  Shared& shared;
  uint32_t* mask;  // [words] in dynamic shared memory; behind it `before` and `listed`
  const int words = gate.col_tiles * 8;
  int* before = reinterpret_cast<int*>(mask) + words;
  int* listed = before + words;
  const int plain_tiles = (gate.rows + kTileTokens - 1) / kTileTokens;
  const int slot = threadIdx.x % kTileTokens, first = threadIdx.x / kTileTokens;
  int tile = 0;
  Columns columns{0, 0, 1};
  uint4 heads[kAhead];

  // Parts of the tile, from the kernel's parameters, so that it takes no register.
  __device__ __forceinline__ int parts() const {
    return tile < plain_tiles ? plain_parts : heavy_parts;
  }
  // Whether this thread publishes that the tile's rows are judged.
  __device__ __forceinline__ bool publishes() const {
    return threadIdx.x == 0 && tile < plain_tiles && columns.first == 0;
  }
  __device__ __forceinline__ int place() const { return tile * kTileTokens + slot; }
  __device__ __forceinline__ void load_heads(int token, int from) {
    if constexpr (!kCandidates) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = from + j * kStride;
        heads[j] = token >= 0 && i < columns.count
                       ? *twell_reader::tile_quads(gate, token, columns.first + i)
                       : uint4{};
      }
    }
  }
  __device__ __forceinline__ void begin(int tile_in, int part) {
    tile = tile_in;
    columns = Columns(gate.col_tiles, part, parts());
    // Unrolled, loops that mostly run once share an index of later turns, which spills.
#pragma unroll 1
    for (int i = threadIdx.x; i < columns.words(); i += kThreads) mask[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < columns.count; i += kThreads) listed[i] = 0;
    if (threadIdx.x < 2) shared.spilled[threadIdx.x] = 0;
  }

  // Starts on a plain tile: 128 consecutive rows without the heavy ones. Returns this thread's
  // token or -1.
  __device__ __forceinline__ int begin_plain(int tile_in, int part) {
    begin(tile_in, part);
    if (gate.packed != nullptr && threadIdx.x == 0) {
      const int end = min((tile + 1) * kTileTokens, gate.rows);
      int phase = 0;
#pragma unroll
      for (int i = 0; i + 1 < GateProgress::kPhases; ++i) phase += gate.phases.tokens[i] < end;
      while (gpu::load_acquire(gate.packed + phase) < gate.phases.ctas) __nanosleep(100);
    }
    __syncthreads();
    const int row = place() < gate.rows ? place() : -1;
    load_heads(row, first);
    const int nnz = row >= 0 ? gate.row_nnz[row] : 0;
    const bool heavy =
        shared.heavy.judge<kCandidates>(gate, tile, nnz, part == 0 ? activity : nullptr);
    if (part == 0) {
      const uint32_t apart = __ballot_sync(~0u, heavy);
      if (threadIdx.x < kTileTokens) {
        tiles.tokens[place()] = heavy ? -1 : row;
        if (threadIdx.x % 32 == 0) {
          reinterpret_cast<uint32_t*>(tiles.heavy + tile)[threadIdx.x / 32] = apart;
        }
      }
      __syncthreads();
    }
    return heavy ? -1 : row;
  }

  // Starts on the next part of a tile of heavy rows, which exist once all rows are judged. A CTA
  // that has finished its plain tile takes such parts; at least the CTA that judged last sees them.
  // Returns this thread's token or -1; tile is -1 when there is no part left.
  __device__ __forceinline__ int begin_heavy() {
    if (threadIdx.x == 0) {
      const bool judged = gpu::load_acquire(&tiles.counts->judged) == plain_tiles;
      shared.item = judged ? atomicAdd(&tiles.counts->heavy_taken, 1) : -1;
    }
    __syncthreads();
    const int item = shared.item, index = item / heavy_parts, part = item % heavy_parts;
    tile = -1;
    if (item < 0) return -1;
    const int rows = shared.heavy.gather<kThreads>(tiles, plain_tiles, index);
    const int heavy_tiles = (rows + kTileTokens - 1) / kTileTokens;
    if (item == 0) {
      if (threadIdx.x == 0) tiles.counts->heavy_tiles = heavy_tiles;
      complete(tiles.max_tiles - plain_tiles - heavy_tiles);  // count the unused tiles as complete
    }
    if (index >= heavy_tiles) return -1;
    begin(plain_tiles + index, part);
    const int token = shared.heavy.tokens[slot];
    if (part == 0 && threadIdx.x < kTileTokens) tiles.tokens[place()] = token;
    load_heads(token, first);
    __syncthreads();
    return token;
  }

  // Processes the part whose first heads are loaded.
  __device__ __forceinline__ void find(int token) {
    if constexpr (kCandidates) {
      unite_candidates(token);
    } else {
      unite_non_zeros(token);
    }
    uint32_t* out = tiles.mask + int64_t{tile} * words + columns.first_word();
#pragma unroll 1
    for (int i = gpu::opaque(threadIdx.x); i < columns.words(); i += kThreads) out[i] = mask[i];
    if (parts() > 1 && !last_part()) return;
    number_neurons();
    complete(1);
  }

  // Adds the candidates of the part's tokens to the mask. Ends with a barrier.
  __device__ __forceinline__ void unite_candidates(int token) {
    if (publishes()) gpu::add_release(&tiles.counts->judged, 1);
    const int lane = threadIdx.x % 32;
    const auto* bits = reinterpret_cast<const uint4*>(gate.candidates) +
                       (int64_t{max(token, 0)} * gate.col_tiles + columns.first) * 2;
#pragma unroll 1
    for (int batch = first; batch < columns.count; batch += kStride * kAhead) {
      uint4 found[kAhead][2] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = batch + j * kStride;
        if (token < 0 || i >= columns.count) continue;
        found[j][0] = bits[2 * i];
        found[j][1] = bits[2 * i + 1];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = batch + j * kStride;
        if (i >= columns.count) break;
        uint32_t mine = 0;  // lane w of the warp's first eight keeps word w
#pragma unroll
        for (int w = 0; w < 8; ++w) {
          const uint4& half = found[j][w / 4];
          const uint32_t word = w % 4 == 0   ? half.x
                                : w % 4 == 1 ? half.y
                                : w % 4 == 2 ? half.z
                                             : half.w;
          const uint32_t of_warp = __reduce_or_sync(~0u, word);
          if (lane == w) mine = of_warp;
        }
        if (mine != 0) atomicOr(&mask[i * 8 + lane], mine);
      }
    }
    __syncthreads();
    // A warp brings a column tile's bits into the order of its neurons (CandidatesCuda).
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < columns.count; i += kThreads / 32) {
      const uint32_t word = lane < 8 ? mask[i * 8 + lane] : 0;
      uint32_t ordered = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) {  // neurons 32 w + lane
        const uint32_t source = __shfl_sync(~0u, word, lane % 8);
        const uint32_t of_warp = __ballot_sync(~0u, source >> (4 * w + lane / 8) & 1);
        if (lane == w) ordered = of_warp;
      }
      __syncwarp();
      if (lane < 8) mask[i * 8 + lane] = ordered;
    }
    __syncthreads();
  }

  // Adds the non-zeros of the part's tokens to the mask, and lists them. Ends with a barrier.
  __device__ __forceinline__ void unite_non_zeros(int token) {
    const int64_t first_column_tile = int64_t{tile} * gate.col_tiles + columns.first;
    uint32_t* entries = tiles.entries + first_column_tile * kListed;
#pragma unroll 1
    for (int batch = 0, odd = 0; batch < columns.count; batch += kStride * kAhead, odd ^= 1) {
      if (batch > 0) load_heads(token, batch + first);
      uint4 next[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = batch + first + j * kStride, non_zeros = static_cast<int>(heads[j].x);
        next[j] = token >= 0 && non_zeros > 3 && non_zeros < gate.slots
                      ? twell_reader::tile_quads(gate, token, columns.first + i)[1]
                      : uint4{};
      }
      if (batch == 0 && publishes()) {  // while the loads are in flight
        gpu::add_release(&tiles.counts->judged, 1);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = batch + first + j * kStride;
        if (i >= columns.count) break;
        const bool spilled =
            token >= 0 && twell_reader::is_spilled(gate, static_cast<int>(heads[j].x));
        if (spilled) {
          shared.list[atomicAdd(&shared.spilled[odd], 1)] = int2{i, static_cast<int>(heads[j].y)};
          if constexpr (kVariant == Variant::kListing) atomicAdd(listed + i, kListed + 1);
        }
        __syncwarp();
        const ColumnTile<kVariant == Variant::kListing> column_tile{mask + i * 8, listed + i,
                                                                    entries + int64_t{i} * kListed};
        column_tile.add(twell_reader::tile_quads(gate, max(token, 0), columns.first + i), heads[j],
                        next[j], token >= 0 && !spilled ? static_cast<int>(heads[j].x) : 0, slot);
      }
      __syncthreads();
      if (const int spilled = shared.spilled[odd]; spilled > 0) {
        mark_spilled<kThreads>(gate, shared.list, spilled, mask);
        __syncthreads();
        if (threadIdx.x == 0) shared.spilled[odd] = 0;
      }
    }
    if constexpr (kVariant == Variant::kListing) {
      for (int i = threadIdx.x; i < columns.count; i += kThreads) {
        tiles.listed[first_column_tile + i] = listed[i];
      }
    }
  }

  // True in the CTA that finishes its tile last, which then has the tile's whole mask.
  __device__ __forceinline__ bool last_part() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.last = atomicAdd(tiles.marked + tile, 1) == parts() - 1;
      __threadfence();
    }
    __syncthreads();
    if (!shared.last) return false;
    const uint32_t* whole = tiles.mask + int64_t{tile} * words;
    for (int i = gpu::opaque(threadIdx.x); i < words; i += kThreads) mask[i] = __ldcg(whole + i);
    __syncthreads();
    return true;
  }

  // Numbers the neurons of a tile whose mask is whole.
  __device__ __forceinline__ void number_neurons() {
    const int64_t offset = int64_t{tile} * words;
    bool early = false;
    if constexpr (kItems) {  // issued early to hide the load's latency
      const volatile int32_t* queued = &tiles.counts->up_items;
      early = threadIdx.x == 0 && *queued < ctas;
    }
    int neurons = 0;
    for (int base = 0; base < words; base += kThreads) {
      const int i = base + static_cast<int>(gpu::opaque(threadIdx.x));
      int total;
      const int below =
          neurons + block_scan<kThreads>(i < words ? __popc(mask[i]) : 0, shared.heavy.scan, total);
      if (i < words) {
        before[i] = below;
        tiles.before[offset + i] = below;
      }
      neurons += total;
    }
    if constexpr (kItems) {
      list_neurons(neurons, early);
    } else {
      if (threadIdx.x == 0) tiles.union_size[tile] = neurons;
    }
  }

  // Lists the neurons of a numbered tile. With `early` it adds the tile's work items at once,
  // because up might otherwise be idle; other items wait until it is known which tiles are large.
  __device__ __forceinline__ void list_neurons(int neurons, bool early) {
    const int chunks = chunks_of(tiles, neurons);
    const int first_block = tile * tiles.blocks;
    __syncthreads();
    int first_item = -1;
    if (threadIdx.x == 0) {
      tiles.union_size[tile] = neurons;
      tiles.first_block[tile] = first_block;
      if (early) {
        tiles.marked[tile] = kHasItems;
        first_item = atomicAdd(&tiles.counts->up_items, chunks);
      }
    }
    int32_t* ids = tiles.union_ids + int64_t{first_block} * kBlock;
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < words; i += kThreads / 32) {
      const uint32_t word = mask[i];
      if (word >> lane & 1) ids[before[i] + __popc(word & ((1u << lane) - 1))] = i * 32 + lane;
    }
    if (threadIdx.x == 0) shared.first_item = first_item;
    __syncthreads();
    if (shared.first_item >= 0) {
      add_items(tiles, tile, neurons, shared.first_item, threadIdx.x, kThreads);
    }
  }

  // Counts `more` tiles as complete; the CTA that completes the last one orders them all.
  __device__ __forceinline__ void complete(int more) {
    if (more == 0) return;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      shared.last = atomicAdd(&tiles.counts->sized, more) == tiles.max_tiles - more;
      __threadfence();
    }
    __syncthreads();
    if (!shared.last) return;
    const int count = plain_tiles + __ldcg(&tiles.counts->heavy_tiles);
    const int32_t* sizes = tiles.union_size;
    if (count <= kCachedSizes) {
      for (int i = threadIdx.x; i < count; i += kThreads) {
        shared.sizes[i] = __ldcg(tiles.union_size + i);
      }
      sizes = shared.sizes;
      __syncthreads();
    }
    order_tiles<kThreads>(tiles, sizes, count, mask, shared.heavy.scan);
    [[maybe_unused]] const int items =
        add_other_items<kThreads>(tiles, sizes, count, shared.heavy.scan);
    if constexpr (!kItems) {
      place_blocks<kThreads>(tiles, sizes, count, shared.heavy.scan);
      if (threadIdx.x == 0) {
        tiles.counts->up_items = items;
        tiles.counts->plain_tiles = plain_tiles;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      tiles.counts->tiles = count;
      gpu::store_release(&tiles.counts->complete, 1);
    }
    count_unions<kThreads, kCandidates>(sizes, count, activity, shared.heavy.scan);
    // Our successor waits only for us, so we must outlive the gate GEMM.
    if (gate.packed != nullptr) gpu::wait_for_previous_kernel();
  }
};

// One CTA per part of a plain tile.
template <Variant kVariant>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor)
    find_unions_kernel(Gate gate, Tiles tiles, int parts, int heavy_parts, int ctas,
                       ActivityCuda* activity) {
  extern __shared__ uint32_t scratch[];
  __shared__ Shared shared;
#if __CUDA_ARCH__ != 900
  if constexpr (kVariant != Variant::kCompact) return;  // those are for Hopper's kernels
#endif
  if (gate.packed == nullptr) gpu::wait_for_previous_kernel();
  gpu::allow_next_kernel();  // up waits for work items by itself, place_gates for this kernel
  PartFinder<kVariant> finder{gate, tiles, activity, ctas, parts, heavy_parts, shared, scratch};
  const int item = blockIdx.x;
  int token = finder.begin_plain(item / parts, item % parts);
  while (finder.tile >= 0) {
    finder.find(token);
    token = finder.begin_heavy();
  }
}

template <Variant kVariant>
cudaError_t launch(const Gate& gate, const Tiles& tiles, ActivityCuda* activity, int ctas,
                   int ctas_to_fill, cudaStream_t stream) {
  const int plain_tiles = (gate.rows + kTileTokens - 1) / kTileTokens;
  const int parts = std::clamp(ctas_to_fill / plain_tiles, 1, std::min(gate.col_tiles, kMaxParts));
  const int heavy_parts = std::clamp((gate.col_tiles + 1) / 2, 1, kMaxParts);
  // Holds masks, neurons below each word and list lengths; in the end the tiles sorted by size.
  const int bytes = std::max(gate.col_tiles * (8 + 8 + 1), tiles.blocks + 1) * 4;
  const auto kernel = find_unions_kernel<kVariant>;
  const cudaError_t status = gpu::allow_most_shared_memory(kernel);
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(plain_tiles * parts), kThreads, bytes, stream, gate,
                               tiles, parts, heavy_parts, ctas, activity);
}

}  // namespace

cudaError_t launch_find_unions(const Gate& gate, const Tiles& tiles, ActivityCuda* activity,
                               int32_t* progress, int64_t progress_words, int ctas,
                               cudaStream_t stream) {
  if (gate.packed == nullptr && progress_words > 0) {
    const cudaError_t status =
        cudaMemsetAsync(progress, 0, static_cast<size_t>(progress_words) * 4, stream);
    if (status != cudaSuccess) return status;
  }
  if (tiles.entries != nullptr) {
    return launch<Variant::kListing>(gate, tiles, activity, ctas, ctas, stream);
  }
  // No gate GEMM runs at the same time, so there are as many parts as fill the SMs.
  const int ctas_to_fill = kCtasPerMultiprocessor * ctas;
  return gate.candidates != nullptr
             ? launch<Variant::kCandidates>(gate, tiles, activity, ctas, ctas_to_fill, stream)
             : launch<Variant::kCompact>(gate, tiles, activity, ctas, ctas_to_fill, stream);
}

}  // namespace twell::tile_union
