// SPDX-License-Identifier: Apache-2.0
// The hybrid execution of the feed-forward layer in training on the GPU: kernels on tiles of
// tokens, kernels on tiles of neurons, the memory they work in, and the order in which they run.
// Neurons and tokens have a fixed order everywhere, so that sums repeat bit for bit. All pointers
// of kernels are device memory.
//
// Kernels per chunk of tokens; those of unions are in ops/ffn/sparse_up_down_cuda.h:
//   forward   gate GEMM, find_unions, place_gates; up: u on the unions; keep; down
//   backward  up with d_y and w_down: d_h on the unions; expand; down with two products: d_x;
//             then by neuron: rank, neuron_unions, transpose, weight_grads
// An image is bf16 values of 128 rows by 64 columns per block, as WGMMA reads them: row-major, each
// row's eight pieces of 16 bytes permuted by XOR with row % 8.
#include <algorithm>
#include <cstdint>

#include "twell/base/rounding.h"
#include "twell/format/activity_cuda.h"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"
#include "twell/ops/ffn/tile_union/gathered_gemm_sm90.cuh"
#include "twell/ops/ffn_train/ffn_train_parts.cuh"

namespace twell::ffn_train {
namespace {

namespace gathered = tile_union::gathered;
using gpu::block_scan;
using tile_union::kBlock;
using tile_union::kColumns;
using tile_union::kTileTokens;
using tile_union::Tiles;

// Index in an image's block of the value of a row and a column.
__device__ __forceinline__ int value_index(int row, int column) {
  return row * kBlock + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// Tokens per chunk. The memory of the images is proportional to it, because it must be enough for
// any pattern. Smaller chunks would read and write the weight gradients more often.
constexpr int kChunkTokens = 16384;
constexpr int kMaxChunkTiles =
    kChunkTokens / kTileTokens +
    (kChunkTokens / tile_union::kHeavyFactor + kTileTokens - 1) / kTileTokens;
constexpr int kNeuronTile = 128;  // neurons

// State of one chunk. All 0 before forward.
struct KeptState {
  unsigned long long used;  // values, including those that did not fit
  ActivityCuda activity;
  uint32_t ticket;               // CTAs of keep that have finished
  int32_t overflow;              // 1: something did not fit, and backward computes g and u again
  int32_t up_taken, down_taken;  // queue counters of the GEMMs up and down
};

// What forward keeps of a chunk's activations for backward. Its tiles are kept too, but not their
// images.
struct Kept {
  uint32_t* values;   // [capacity] g | u << 16 of active pairs, by block, neuron, token
  uint4* masks;       // [block_capacity, kBlock] per neuron, a bit for each token it is active on
  uint32_t* offsets;  // [block_capacity] index of a block's first value
  KeptState* state;
  int64_t capacity;
  int block_capacity;
};

// --- keep and expand: elementwise, on tiles of tokens -------------------------------------------
//
// A CTA handles one block of 128 tokens by 64 neurons at a time: first in pieces of eight neurons,
// which have the same order in all images, then with 32 tokens of one neuron per thread.

// keep: h = f(g) * u in place of g; keeps g and u of active pairs; counts.
struct Keep {
  Tiles tiles;             // activations: image of g in, of h out
  const __nv_bfloat16* u;  // image, or null: no gate
  Kept kept;
  double* l1_parts;            // [blocks]
  FfnTrainCountsCuda* counts;  // added to, or null
  uint8_t* active;             // [F], or null
  bool squared;                // relu2: f(g) = g^2
  bool up_relu;                // dReLU
};

// expand: from d_h and what was kept, d_g, d_u and h as images on the unions, exactly 0 where a
// neuron is not active. Where the chunk overflowed, g and u come from images instead.
struct Expand {
  Tiles tiles;         // activations: image of h out; of g in, where the chunk overflowed
  __nv_bfloat16* d_u;  // image out, null without a gate; of u in, where the chunk overflowed
  __nv_bfloat16* d_g;  // image out; of d_h in
  Kept kept;
  uint4* masks;           // [blocks, kBlock] written where the chunk overflowed
  int32_t* neuron_nnz;    // [F] added to
  const float* l1_scale;  // one value
  bool squared;           // relu2
  bool up_relu;           // dReLU
};

constexpr int kThreads = 256;
constexpr int kCtasPerMultiprocessor = 5;

// The tile that a block belongs to. Lives in shared memory.
struct BlockIndex {
  int tiles, blocks;
  int first[kMaxChunkTiles];

  // Called by all threads of the CTA. Ends with a barrier.
  __device__ void load(const Tiles& all) {
    const int count = all.counts->tiles;
    for (int i = threadIdx.x; i < count; i += blockDim.x) first[i] = all.first_block[i];
    if (threadIdx.x == 0) {
      tiles = count;
      blocks = all.first_block[count - 1] + (all.union_size[count - 1] + kBlock - 1) / kBlock;
    }
    __syncthreads();
  }
  // The last tile whose first block is not behind this one. Tiles without blocks share their first
  // block with the tile that has it, and come before that tile.
  __device__ int tile_of(int block) const {
    int low = 0, high = tiles;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

constexpr int kBlockPieces = kTileTokens * kBlock / 8;  // pieces of 16 bytes in a block
constexpr int kPieces = kBlockPieces / kThreads;        // per thread
constexpr int kWordsPerNeuron = kTileTokens / 32;
static_assert(kBlock * kWordsPerNeuron == kThreads);

__device__ __forceinline__ uint4* block_pieces(__nv_bfloat16* image, int block) {
  return reinterpret_cast<uint4*>(image) + int64_t{block} * kBlockPieces;
}
// Piece i of an image's block holds values of token i / 8; returns which eight neurons they are of.
__device__ __forceinline__ int piece_columns(int i) { return (i % 8) ^ (i / 8 % 8); }
// One block of g and u in shared memory, in the layout of images.
struct BlockValues {
  uint4 g[kBlockPieces];
  uint4 u[kBlockPieces];
  uint8_t fired[kTileTokens][8];  // bit per neuron
  int scratch[kThreads / 32];

  __device__ void put_fired(int piece, uint32_t bits) {
    fired[piece / 8][piece_columns(piece)] = static_cast<uint8_t>(bits);
  }
  // Bit per token on which a neuron fires. Thread t has neuron t / 4 and 32 tokens from
  // t % 4 * 32 on.
  __device__ uint32_t tokens_of_thread() const {
    const int column = threadIdx.x / kWordsPerNeuron, first = threadIdx.x % kWordsPerNeuron * 32;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      bits |= static_cast<uint32_t>(fired[first + i][column / 8] >> (column % 8) & 1) << i;
    }
    return bits;
  }
  // Index in g and u of the thread's neuron and of a bit's token.
  __device__ int index_of(int bit) const {
    return value_index(threadIdx.x % kWordsPerNeuron * 32 + bit, threadIdx.x / kWordsPerNeuron);
  }
};

// Called by the CTA that finishes last.
__device__ void finish_counts(const Keep& keep, int blocks) {
  double l1 = 0.0;
  for (int i = threadIdx.x; i < blocks; i += kThreads) l1 += __ldcg(keep.l1_parts + i);
  l1 = block_sum<kThreads>(l1);
  if (threadIdx.x != 0) return;
  const KeptState& state = *keep.kept.state;
  keep.counts->l1_sum += l1;
  keep.counts->nnz += state.activity.nnz;
  keep.counts->tokens += state.activity.tokens;
  keep.counts->union_neurons += state.activity.union_neurons;
  keep.counts->max_row_nnz =
      max(keep.counts->max_row_nnz, static_cast<int32_t>(state.activity.max_row_nnz));
  keep.counts->recomputed += *reinterpret_cast<const volatile int32_t*>(&state.overflow);
}

__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor) keep_kernel(Keep keep) {
  __shared__ BlockIndex index;
  __shared__ BlockValues values;
  __shared__ unsigned long long block_offset;
  __shared__ bool last;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  index.load(keep.tiles);
  KeptState& state = *keep.kept.state;
  for (int block = blockIdx.x; block < index.blocks; block += gridDim.x) {
    uint4* gate = block_pieces(keep.tiles.activations, block);
    const uint4* up =
        keep.u != nullptr ? block_pieces(const_cast<__nv_bfloat16*>(keep.u), block) : nullptr;
    float l1 = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = threadIdx.x + i * kThreads;
      const uint4 g = gate[piece];
      uint4 u = up != nullptr ? up[piece] : uint4{kOnes, kOnes, kOnes, kOnes};
      if (keep.up_relu) u = relu_of(u);
      const uint32_t fired = fired_bits(g);
      values.put_fired(piece, fired);
      if (fired == 0) continue;
      values.g[piece] = g;
      values.u[piece] = u;
      gate[piece] = {
          hidden_pair(g.x, u.x, keep.squared, l1), hidden_pair(g.y, u.y, keep.squared, l1),
          hidden_pair(g.z, u.z, keep.squared, l1), hidden_pair(g.w, u.w, keep.squared, l1)};
    }
    const double sum = block_sum<kThreads>(static_cast<double>(l1));  // contains barriers
    if (threadIdx.x == 0) keep.l1_parts[block] = sum;

    const uint32_t tokens = values.tokens_of_thread();
    int total;
    const int before = block_scan<kThreads>(__popc(tokens), values.scratch, total);
    if (threadIdx.x == 0) {
      block_offset = atomicAdd(&state.used, static_cast<unsigned long long>(total));
    }
    __syncthreads();
    const unsigned long long offset = block_offset;
    if (offset + total <= static_cast<unsigned long long>(keep.kept.capacity) &&
        block < keep.kept.block_capacity) {
      reinterpret_cast<uint32_t*>(keep.kept.masks)[int64_t{block} * kThreads + threadIdx.x] =
          tokens;
      if (threadIdx.x == 0) keep.kept.offsets[block] = static_cast<uint32_t>(offset);
      uint32_t* out = keep.kept.values + offset + before;
      for (uint32_t left = tokens; left != 0; left &= left - 1) {
        const int at = values.index_of(__ffs(static_cast<int>(left)) - 1);
        const uint32_t g = reinterpret_cast<const uint16_t*>(values.g)[at];
        const uint32_t u = reinterpret_cast<const uint16_t*>(values.u)[at];
        *out++ = g | u << 16;
      }
    } else if (threadIdx.x == 0) {
      state.overflow = 1;
    }
    if (keep.active != nullptr && threadIdx.x < kBlock) {
      const int tile = index.tile_of(block);
      const int position = (block - index.first[tile]) * kBlock + threadIdx.x;
      if (position < keep.tiles.union_size[tile]) {
        uint8_t* flag = keep.active + keep.tiles.union_ids[int64_t{block} * kBlock + threadIdx.x];
        if (*flag == 0) *flag = 1;
      }
    }
    __syncthreads();
  }
  if (keep.counts == nullptr) return;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&state.ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last) finish_counts(keep, index.blocks);
}

// Makes g and u of a block from what was kept. Returns a bit per token on which this thread's
// neuron fires (BlockValues::tokens_of_thread).
__device__ __forceinline__ uint32_t restore(const Kept& kept, int block, BlockValues& values) {
  const uint32_t tokens =
      reinterpret_cast<const uint32_t*>(kept.masks)[int64_t{block} * kThreads + threadIdx.x];
  const uint32_t* from = kept.values + kept.offsets[block];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    values.g[threadIdx.x + i * kThreads] = uint4{};
    values.u[threadIdx.x + i * kThreads] = uint4{};
  }
  int total;
  from += block_scan<kThreads>(__popc(tokens), values.scratch, total);  // contains barriers
#pragma unroll 4
  for (uint32_t left = tokens; left != 0; left &= left - 1) {
    const int at = values.index_of(__ffs(static_cast<int>(left)) - 1);
    const uint32_t value = *from++;
    reinterpret_cast<uint16_t*>(values.g)[at] = static_cast<uint16_t>(value);
    reinterpret_cast<uint16_t*>(values.u)[at] = static_cast<uint16_t>(value >> 16);
  }
  __syncthreads();
  return tokens;
}

// The same from images of g and u, which were computed again.
__device__ __forceinline__ uint32_t reload(const Expand& expand, int block, BlockValues& values) {
  const uint4* g = block_pieces(expand.tiles.activations, block);
  const uint4* u = expand.d_u != nullptr ? block_pieces(expand.d_u, block) : nullptr;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * kThreads;
    values.g[piece] = g[piece];
    values.u[piece] = u != nullptr ? u[piece] : uint4{kOnes, kOnes, kOnes, kOnes};
    values.put_fired(piece, fired_bits(values.g[piece]));
  }
  __syncthreads();
  const uint32_t tokens = values.tokens_of_thread();
  reinterpret_cast<uint32_t*>(expand.masks)[int64_t{block} * kThreads + threadIdx.x] = tokens;
  return tokens;
}

__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor) expand_kernel(Expand expand) {
  __shared__ BlockIndex index;
  __shared__ BlockValues values;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  index.load(expand.tiles);
  const bool overflow = expand.kept.state->overflow != 0;
  const float l1_scale = *expand.l1_scale;
  for (int block = blockIdx.x; block < index.blocks; block += gridDim.x) {
    uint4* h = block_pieces(expand.tiles.activations, block);
    uint4* d_u = expand.d_u != nullptr ? block_pieces(expand.d_u, block) : nullptr;
    uint4* d_g = block_pieces(expand.d_g, block);
    uint4 hidden[kPieces];  // d_h, loaded early to hide the latency
#pragma unroll
    for (int i = 0; i < kPieces; ++i) hidden[i] = d_g[threadIdx.x + i * kThreads];
    const uint32_t tokens =
        overflow ? reload(expand, block, values) : restore(expand.kept, block, values);
    int count = __popc(tokens);
    count += __shfl_xor_sync(~0u, count, 1);
    count += __shfl_xor_sync(~0u, count, 2);
    if (threadIdx.x % kWordsPerNeuron == 0 && count > 0) {
      const int neuron =
          expand.tiles.union_ids[int64_t{block} * kBlock + threadIdx.x / kWordsPerNeuron];
      atomicAdd(&expand.neuron_nnz[neuron], count);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = threadIdx.x + i * kThreads;
      uint4 g = values.g[piece], u = values.u[piece];
      if (fired_bits(g) != 0) {
        if (expand.up_relu) u = relu_of(u);
        backward_eight(hidden[i], g, u, expand.squared, expand.up_relu, l1_scale);
      } else {
        hidden[i] = u = g = uint4{};
      }
      h[piece] = hidden[i];
      d_g[piece] = g;
      if (d_u != nullptr) d_u[piece] = u;
    }
    __syncthreads();
  }
}

cudaError_t launch_keep(const Keep& keep, int ctas, cudaStream_t stream) {
  return gpu::launch_dependent(keep_kernel, dim3(ctas * kCtasPerMultiprocessor), kThreads, 0,
                               stream, keep);
}

cudaError_t launch_expand(const Expand& expand, int ctas, cudaStream_t stream) {
  return gpu::launch_dependent(expand_kernel, dim3(ctas * kCtasPerMultiprocessor), kThreads, 0,
                               stream, expand);
}

// --- tiles of neurons ---------------------------------------------------------------------------

// Weight gradients are sums over tokens, so here 128 neurons make a tile, which gathers the tokens
// that any of them is active on. Neurons that fire about equally often share a tile.
struct NeuronCounts {
  int32_t tiles;
  int32_t blocks;      // of all tiles
  int32_t items;       // of weight_grads
  int32_t arrived;     // CTAs of neuron_unions that have finished
  int32_t transposed;  // blocks that CTAs of transpose have taken
  // Queue counters of weight_grads, of the product d_y w_down^T, of u when it is computed again,
  // and of d_x.
  int32_t taken, up_taken, again_taken, down_taken;
};
struct NeuronTiles {
  // Must be 0 before backward:
  int32_t* nnz;    // [F] tokens that a neuron is active on
  int32_t* size;   // [tiles] tokens that any neuron of the tile is active on
  int32_t* turns;  // [tiles, products * columns, 2] pieces added so far
  NeuronCounts* counts;
  // Written by backward:
  int32_t* order;        // [tiles, kNeuronTile] neuron, or -1
  uint32_t* mask;        // [tiles, words] a bit per slot of the token tiles
  int32_t* positions;    // [tiles, words / 4, kNeuronTile] a neuron's position in the union of a
                         // token tile, counted from the first block of all; or -1
  int32_t* first_block;  // [tiles]
  int32_t* ids;          // [blocks, kBlock] token, or -1
  __nv_bfloat16* images[3];  // by product: [blocks, kNeuronTile, kBlock]
  int4* entries;             // {first block, blocks, tile, 2 * piece + (1: more pieces follow)}
  int ffn;                   // F
  int max_tiles;             // F / kNeuronTile rounded up
  int words;                 // 4 per token tile
  int products;              // 3, or 2 without a gate
  int columns;               // D / 256 rounded up
};

struct Transpose {
  Tiles tiles;
  Kept kept;
  const uint4* masks;              // those of expand
  const __nv_bfloat16* images[3];  // by product, images on the token tiles
  NeuronTiles neurons;
};

// Blocks of a tile of neurons.
__device__ __forceinline__ int tile_blocks(const NeuronTiles& neurons, int tile) {
  return (neurons.size[tile] + kBlock - 1) / kBlock;
}

// A bit for each lane of the warp below this thread's.
__device__ __forceinline__ uint32_t lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// --- rank: sorts neurons by class of nnz, largest first, with four classes per factor of two -----
constexpr int kClasses = 128;

// Class 0 holds the largest counts, the last class the neurons that never fire.
__device__ __forceinline__ int class_of(int nnz) {
  if (nnz == 0) return kClasses - 1;
  const int exponent = 31 - __clz(nnz);
  const int quarter = (exponent >= 2 ? nnz >> (exponent - 2) : nnz << (2 - exponent)) & 3;
  return kClasses - 2 - (exponent * 4 + quarter);
}

constexpr int kRankThreads = 1024;

// A stable counting sort by one CTA.
__global__ void __launch_bounds__(kRankThreads) rank_neurons_kernel(NeuronTiles neurons) {
  __shared__ int of_warp[kRankThreads / 32][kClasses];
  __shared__ int next[kClasses];  // where the next neuron of a class goes
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < kClasses) next[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < neurons.ffn; i += kRankThreads) {
    atomicAdd(&next[class_of(neurons.nnz[i])], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int& place : next) {
      const int count = place;
      place = sum;
      sum += count;
    }
    neurons.counts->tiles = (next[kClasses - 1] + kNeuronTile - 1) / kNeuronTile;
  }
  __syncthreads();
  const int active = next[kClasses - 1];
  for (int first = 0; first < neurons.ffn; first += kRankThreads) {
    for (int i = threadIdx.x; i < kRankThreads / 32 * kClasses; i += kRankThreads) {
      of_warp[i / kClasses][i % kClasses] = 0;
    }
    __syncthreads();
    const int neuron = first + threadIdx.x;
    const int own = class_of(neuron < neurons.ffn ? neurons.nnz[neuron] : 0);
    const uint32_t peers = __match_any_sync(~0u, own);
    const int rank = __popc(peers & lanes_below());
    if (rank == 0) of_warp[warp][own] = __popc(peers);
    __syncthreads();
    if (threadIdx.x < kClasses) {
      int sum = next[threadIdx.x];
      for (auto& counts : of_warp) {
        const int count = counts[threadIdx.x];
        counts[threadIdx.x] = sum;
        sum += count;
      }
      next[threadIdx.x] = sum;
    }
    __syncthreads();
    if (own < kClasses - 1) neurons.order[of_warp[warp][own] + rank] = neuron;
    __syncthreads();
  }
  const int padded = (active + kNeuronTile - 1) / kNeuronTile * kNeuronTile;
  for (int i = active + threadIdx.x; i < padded; i += kRankThreads) neurons.order[i] = -1;
}

// --- neuron unions -------------------------------------------------------------------------------
constexpr int kUnionThreads = 512;
constexpr int kUnionParts = 4;

// Blocks per piece of a sum. Longer pieces are added to the gradients less often; shorter ones
// spread the work over CTAs more evenly.
constexpr int kMinPiece = 24, kMaxPiece = 128, kItemsPerCta = 4;

// The position of a neuron in the union of a tile of tokens, counted from the first block of all;
// -1 where it is not in the union.
__device__ __forceinline__ int find_position(const Tiles& tiles, int words, int tile, int neuron) {
  if (neuron < 0) return -1;
  const int64_t word = int64_t{tile} * words + neuron / 32;
  const uint32_t bits = tiles.mask[word];
  if ((bits >> (neuron % 32) & 1) == 0) return -1;
  return tiles.first_block[tile] * kBlock + static_cast<int>(tiles.before[word]) +
         __popc(bits & ((1u << (neuron % 32)) - 1));
}

// Called by one CTA: where each tile's blocks begin, and the items of weight_grads. The first
// pieces of all sums come first, then all second pieces and so on, so that a later piece seldom
// waits for the one before it.
__device__ void make_items(const NeuronTiles& neurons, int ctas) {
  __shared__ int scratch[kUnionThreads / 32];
  const int tiles = neurons.counts->tiles;
  const int sums = neurons.products * neurons.columns;
  int blocks = 0;
  for (int first = 0; first < tiles; first += kUnionThreads) {
    const int tile = first + threadIdx.x;
    int total;
    const int before =
        block_scan<kUnionThreads>(tile < tiles ? tile_blocks(neurons, tile) : 0, scratch, total);
    if (tile < tiles) neurons.first_block[tile] = blocks + before;
    blocks += total;
  }
  const int share = static_cast<int>((int64_t{blocks} * sums + ctas - 1) / ctas);
  const int piece = min(max(share / kItemsPerCta, kMinPiece), kMaxPiece);
  int entries = 0;
  for (int k = 0, found = 1; found > 0; ++k) {
    found = 0;
    for (int first = 0; first < tiles; first += kUnionThreads) {
      const int tile = first + threadIdx.x;
      const int in_tile = tile < tiles ? tile_blocks(neurons, tile) : 0;
      const int pieces = (in_tile + piece - 1) / piece;
      int total;
      const int before = block_scan<kUnionThreads>(pieces > k ? 1 : 0, scratch, total);
      if (pieces > k) {
        const int begin = in_tile * k / pieces, end = in_tile * (k + 1) / pieces;
        neurons.entries[entries + before] = int4{neurons.first_block[tile] + begin, end - begin,
                                                 tile, 2 * k + (k + 1 < pieces ? 1 : 0)};
      }
      entries += total;
      found += total;
    }
  }
  if (threadIdx.x == 0) {
    neurons.counts->blocks = blocks;
    neurons.counts->items = entries * sums;
  }
}

// kUnionParts CTAs divide the tiles of tokens for one tile of neurons.
__global__ void __launch_bounds__(kUnionThreads)
    neuron_unions_kernel(Transpose transpose, int words, int ctas) {
  __shared__ bool last;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const auto& [tiles, kept, masks_made, images, neurons] = transpose;
  const int tile = blockIdx.y;
  const int lane = threadIdx.x % 32;
  if (tile < neurons.counts->tiles) {
    const uint4* masks = kept.state->overflow != 0 ? masks_made : kept.masks;
    int of_lane[kNeuronTile / 32];
    for (int i = 0; i < kNeuronTile / 32; ++i) {
      of_lane[i] = neurons.order[tile * kNeuronTile + i * 32 + lane];
    }
    int32_t* positions = neurons.positions + int64_t{tile} * neurons.words * (kNeuronTile / 4);
    constexpr int kWarps = kUnionThreads / 32;
    int tokens = 0;
    for (int from = blockIdx.x * kWarps + threadIdx.x / 32; from < tiles.counts->tiles;
         from += kUnionParts * kWarps) {
      uint4 fired{};
#pragma unroll
      for (int i = 0; i < kNeuronTile / 32; ++i) {
        const int position = find_position(tiles, words, from, of_lane[i]);
        positions[(int64_t{from} * kNeuronTile) + i * 32 + lane] = position;
        if (position < 0) continue;
        const uint4 bits = masks[position];
        fired.x |= bits.x;
        fired.y |= bits.y;
        fired.z |= bits.z;
        fired.w |= bits.w;
      }
      fired.x = __reduce_or_sync(~0u, fired.x);
      fired.y = __reduce_or_sync(~0u, fired.y);
      fired.z = __reduce_or_sync(~0u, fired.z);
      fired.w = __reduce_or_sync(~0u, fired.w);
      tokens += __popc(fired.x) + __popc(fired.y) + __popc(fired.z) + __popc(fired.w);
      if (lane == 0) {
        *reinterpret_cast<uint4*>(neurons.mask + int64_t{tile} * neurons.words + from * 4) = fired;
      }
    }
    if (lane == 0 && tokens > 0) atomicAdd(&neurons.size[tile], tokens);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&neurons.counts->arrived, 1) == static_cast<int>(gridDim.x * gridDim.y) - 1;
    __threadfence();
  }
  __syncthreads();
  if (last) make_items(neurons, ctas);
}

int mask_words(const NeuronTiles& neurons) { return (neurons.ffn + 255) / 256 * 8; }

// --- transpose: from images on token tiles to images on neuron tiles ---------------------------
constexpr int kTransposeThreads = 256;
constexpr int kTransposeCtas = 4;
constexpr int kImageBytes = kNeuronTile * kBlock * 2;
constexpr int kMaxWords = kMaxChunkTiles * (kTileTokens / 32);

// The tokens of a tile of neurons. Lives in shared memory.
struct TileTokens {
  uint32_t mask[kMaxWords];
  int before[kMaxWords];  // tokens in all earlier words
  int scratch[kTransposeThreads / 32];
  int words, size;

  // Called by all threads. Begins and ends with a barrier.
  __device__ void load(const uint32_t* from, int count) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kTransposeThreads) mask[i] = from[i];
    __syncthreads();
    const int share = (count + kTransposeThreads - 1) / kTransposeThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * share, count);
    const int end = min(begin + share, count);
    int own = 0;
    for (int i = begin; i < end; ++i) own += __popc(mask[i]);
    int total;
    int sum = block_scan<kTransposeThreads>(own, scratch, total);
    for (int i = begin; i < end; ++i) {
      before[i] = sum;
      sum += __popc(mask[i]);
    }
    if (threadIdx.x == 0) {
      words = count;
      size = total;
    }
    __syncthreads();
  }
  // The word that holds a position: the last one with at most `position` tokens before it.
  __device__ int word_of(int position) const {
    int low = 0, high = words;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (before[middle] <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

struct TransposeShared {
  alignas(16) uint8_t staged[3][kImageBytes];
  TileTokens tokens;
  int3 tile;  // {tile, its first block, its end block}
  int block;
};

// Copies the values of one neuron in 32 slots of a tile of tokens to the neuron's staged row.
template <int Products>
__device__ __forceinline__ void stage_values(const Transpose& transpose, TransposeShared& shared,
                                             int row, int word, int position, uint32_t left,
                                             int begin) {
  const uint32_t mask = shared.tokens.mask[word];
  const int first = shared.tokens.before[word] - begin;
  if (first >= kBlock || first + __popc(mask) <= 0) return;
  const int64_t block = int64_t{position / kBlock} * (kTileTokens * kBlock);
  const int column = position % kBlock, first_slot = word % 4 * 32;
  constexpr int kAtOnce = 4;
  while (left != 0) {
    __nv_bfloat16 values[Products][kAtOnce];
    int to[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int bit = (__ffs(static_cast<int>(left)) - 1) & 31;
      to[i] = left != 0 ? first + __popc(mask & ((1u << bit) - 1)) : -1;
      left &= left - 1;
      if (to[i] < 0 || to[i] >= kBlock) continue;
      const int64_t from = block + value_index(first_slot + bit, column);
#pragma unroll
      for (int p = 0; p < Products; ++p) values[p][i] = transpose.images[p][from];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (to[i] < 0 || to[i] >= kBlock) continue;
      const int at = value_index(row, to[i]);
#pragma unroll
      for (int p = 0; p < Products; ++p) {
        reinterpret_cast<__nv_bfloat16*>(shared.staged[p])[at] = values[p][i];
      }
    }
  }
}

// CTAs take blocks from a counter, because blocks differ in cost.
template <int Products>
__global__ void __launch_bounds__(kTransposeThreads, kTransposeCtas)
    transpose_kernel(Transpose transpose) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<TransposeShared*>(memory);
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const Tiles& tiles = transpose.tiles;
  const NeuronTiles& neurons = transpose.neurons;
  const auto* masks = reinterpret_cast<const uint32_t*>(
      transpose.kept.state->overflow != 0 ? transpose.masks : transpose.kept.masks);
  const int token_words = tiles.counts->tiles * 4;
  const int blocks = neurons.counts->blocks, neuron_tiles = neurons.counts->tiles;
  auto* staged = reinterpret_cast<uint4*>(shared.staged);
  for (int i = threadIdx.x; i < Products * (kImageBytes / 16); i += kTransposeThreads) {
    staged[i] = uint4{};
  }
  // A thread has two of the four words of each tile of tokens. They are not neighbours, because a
  // block often needs only one half of a tile.
  const int row = threadIdx.x % kNeuronTile, odd = threadIdx.x / kNeuronTile;
  int tile = -1, tile_begin = 0, tile_end = 0;
  for (;;) {
    if (threadIdx.x == 0) shared.block = atomicAdd(&neurons.counts->transposed, 1);
    __syncthreads();
    const int block = shared.block;
    if (block >= blocks) break;
    if (block >= tile_end) {
      for (int i = threadIdx.x; i < neuron_tiles; i += kTransposeThreads) {
        const int begin = neurons.first_block[i];
        if (begin <= block && block < begin + tile_blocks(neurons, i)) {
          shared.tile = int3{i, begin, begin + tile_blocks(neurons, i)};
        }
      }
      __syncthreads();
      tile = shared.tile.x;
      tile_begin = shared.tile.y;
      tile_end = shared.tile.z;
      shared.tokens.load(neurons.mask + int64_t{tile} * neurons.words, token_words);
    }
    const int begin = (block - tile_begin) * kBlock;
    const int last_position = min(begin + kBlock, shared.tokens.size) - 1;
    const int first = shared.tokens.word_of(begin), last = shared.tokens.word_of(last_position);
    if (threadIdx.x < kBlock) {
      const int position = begin + static_cast<int>(threadIdx.x);
      int token = -1;
      if (position <= last_position) {
        const int word = shared.tokens.word_of(position);
        uint32_t rest = shared.tokens.mask[word];
        for (int skip = position - shared.tokens.before[word]; skip > 0; --skip) rest &= rest - 1;
        token = tiles.tokens[word * 32 + __ffs(static_cast<int>(rest)) - 1];
      }
      neurons.ids[int64_t{block} * kBlock + threadIdx.x] = token;
    }
    const int32_t* positions =
        neurons.positions + int64_t{tile} * neurons.words * (kNeuronTile / 4) + row;
    constexpr int kAtOnce = 4;
    for (int from = first / 4; from <= last / 4; from += kAtOnce) {
      int position[kAtOnce];
      uint32_t fired[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        position[i] = from + i <= last / 4 ? positions[(from + i) * kNeuronTile] : -1;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          fired[i][w] = position[i] >= 0 ? masks[int64_t{position[i]} * 4 + 2 * w + odd] : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if (fired[i][w] == 0) continue;
          stage_values<Products>(transpose, shared, row, (from + i) * 4 + 2 * w + odd, position[i],
                                 fired[i][w], begin);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < Products; ++p) {
      auto* out = reinterpret_cast<uint4*>(neurons.images[p]) + int64_t{block} * (kImageBytes / 16);
#pragma unroll
      for (int i = threadIdx.x; i < kImageBytes / 16; i += kTransposeThreads) {
        uint4& piece = staged[p * (kImageBytes / 16) + i];
        out[i] = piece;
        piece = uint4{};
      }
    }
    __syncthreads();
  }
}

template <int Products>
cudaError_t launch_transpose_of(const Transpose& transpose, int ctas, cudaStream_t stream) {
  const auto kernel = transpose_kernel<Products>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(TransposeShared));
  if (status != cudaSuccess) return status;
  return gpu::launch_dependent(kernel, dim3(ctas * kTransposeCtas), kTransposeThreads,
                               sizeof(TransposeShared), stream, transpose);
}

cudaError_t launch_rank_neurons(const NeuronTiles& neurons, cudaStream_t stream) {
  return gpu::launch_dependent(rank_neurons_kernel, dim3(1), kRankThreads, 0, stream, neurons);
}

cudaError_t launch_neuron_unions(const Transpose& transpose, int ctas, cudaStream_t stream) {
  const dim3 grid(kUnionParts, static_cast<unsigned>(transpose.neurons.max_tiles));
  return gpu::launch_dependent(neuron_unions_kernel, grid, kUnionThreads, 0, stream, transpose,
                               mask_words(transpose.neurons), ctas);
}

cudaError_t launch_transpose(const Transpose& transpose, int ctas, cudaStream_t stream) {
  return transpose.neurons.products == 3 ? launch_transpose_of<3>(transpose, ctas, stream)
                                         : launch_transpose_of<2>(transpose, ctas, stream);
}

// --- weight_grads -------------------------------------------------------------------------------

// grads[p] [neurons of a tile] += images[p][tile]
// right[p][tokens of the tile]. An item is a piece of one such sum, for 128 neurons by 256 columns.
// The pieces of a sum are added to the gradients in their order, so that results repeat: the CTA
// with a later piece waits until the piece before it is added. This ends however few CTAs run at a
// time. A CTA takes items only while it runs, and works on them in ascending order. So the lowest
// item that is not done is the next one of a running CTA, and waits for none. Where gradients are
// overwritten, the first piece of a sum is stored and the others are added.
struct WeightGrads {
  NeuronTiles neurons;
  const __nv_bfloat16* right[3];  // [M, D]
  float* grads[3];                // [F, D]
  int width;                      // D
  bool add;                       // false: = instead of +=, for neurons that fire
};

struct Problem {
  static constexpr bool kOrdered = true;

  NeuronTiles neurons;
  const __nv_bfloat16* right[3];
  float* grads[3];
  int32_t* taken;
  int width;
  bool add;

  // {tile, product * columns + column block, first block, blocks | (2 * piece + more) << 16}
  __device__ __forceinline__ int4 load(int index) const {
    if (index >= neurons.counts->items) return int4{-1, 0, 0, 0};
    const int sums = neurons.products * neurons.columns;
    const int4 entry = neurons.entries[index / sums];
    return int4{entry.z, index % sums, entry.x, entry.y | entry.w << 16};
  }
  __device__ __forceinline__ gathered::Operands operands(const int4& item) const {
    const int product = item.y / neurons.columns, column = item.y % neurons.columns;
    const auto* image = reinterpret_cast<const uint8_t*>(neurons.images[product]) +
                        int64_t{item.z} * gathered::kBytesA;
    const auto* from = reinterpret_cast<const uint4*>(right[product]);
    const int blocks = item.w & 0xffff;
    return {{image, image},
            {from, from},
            neurons.ids + int64_t{item.z} * tile_union::kBlock,
            blocks * tile_union::kBlock,
            blocks,
            1,
            column * kColumns};
  }

  struct Store {
    const Problem& problem;
    int neuron[2];  // rows of the gradient that this lane has values of
    float* grad;    // this lane's first column
    int columns;    // from there to the end of the row
    int32_t* turn;
    int piece;
    bool more;

    __device__ __forceinline__ Store(const Problem& problem_in, const int4& item)
        : problem(problem_in) {
      const int thread = threadIdx.x % 128, lane = thread % 32;
      const int warpgroup = threadIdx.x / 128 - 1;
      const NeuronTiles& neurons = problem.neurons;
      const int32_t* order =
          neurons.order + item.x * kNeuronTile + warpgroup * 64 + thread / 32 * 16 + lane / 4;
      neuron[0] = order[0];
      neuron[1] = order[8];
      const int column = item.y % neurons.columns * kColumns + lane % 4 * 2;
      grad = problem.grads[item.y / neurons.columns] + column;
      columns = problem.width - column;
      turn = neurons.turns + (int64_t{item.x} * neurons.products * neurons.columns + item.y) * 2 +
             warpgroup;
      piece = item.w >> 17;
      more = (item.w >> 16 & 1) != 0;
    }
    __device__ __forceinline__ void operator()(const float (&acc)[128], uint32_t) const {
      const int warpgroup = threadIdx.x / 128 - 1;
      if (piece > 0) {
        if (threadIdx.x % 128 == 0) {
          while (gpu::load_acquire(turn) != piece) {
          }
        }
        gpu::named_barrier(1 + warpgroup, 128);
      }
      if (piece == 0 && !problem.add) {
        for_each_pair(acc, [](float* to, float a, float b) {
          *reinterpret_cast<float2*>(to) = float2{a, b};
        });
      } else {
        // Reductions in the L2 cache return nothing, so no thread waits for memory. Only one thread
        // at a time adds to a value, so the order of additions is fixed.
        for_each_pair(acc, [](float* to, float a, float b) {
          asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
                       : "memory");
        });
      }
      if (more) {
        __threadfence();
        gpu::named_barrier(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) {
          asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(piece + 1)
                       : "memory");
        }
      }
    }
    template <typename Use>
    __device__ __forceinline__ void for_each_pair(const float (&acc)[128], const Use& use) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (neuron[half] < 0) continue;
        float* row = grad + int64_t{neuron[half]} * problem.width;
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
          if (i * 8 >= columns) continue;
          const int a = 4 * i + 2 * half;
          use(row + i * 8, acc[a], acc[a + 1]);
        }
      }
    }
  };
};

constexpr int kClearThreads = 256;

// One CTA per neuron.
__global__ void __launch_bounds__(kClearThreads) clear_idle_kernel(WeightGrads grads) {
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  if (grads.neurons.nnz[blockIdx.x] != 0) return;
  const int pieces = grads.width / 4;
  for (int p = 0; p < grads.neurons.products; ++p) {
    auto* row = reinterpret_cast<float4*>(grads.grads[p]) + int64_t{blockIdx.x} * pieces;
    for (int i = threadIdx.x; i < pieces; i += kClearThreads) row[i] = float4{};
  }
}

cudaError_t launch_clear_idle(const WeightGrads& grads, cudaStream_t stream) {
  return gpu::launch_dependent(clear_idle_kernel, dim3(static_cast<unsigned>(grads.neurons.ffn)),
                               kClearThreads, 0, stream, grads);
}

cudaError_t launch_weight_grads(const WeightGrads& grads, int ctas, cudaStream_t stream) {
  Problem problem{};
  problem.neurons = grads.neurons;
  for (int p = 0; p < 3; ++p) {
    problem.right[p] = grads.right[p];
    problem.grads[p] = grads.grads[p];
  }
  problem.taken = &grads.neurons.counts->taken;
  problem.width = grads.width;
  problem.add = grads.add;
  return gathered::launch(problem, ctas, stream);
}

// --- memory, and the order of the kernels -------------------------------------------------------

constexpr int32_t kGateTile = 256;   // T of the gate's TwELL
constexpr int32_t kCompression = 8;  // C of it
constexpr int64_t kBlockValues = int64_t{kTileTokens} * kBlock;

// Sizes of the largest chunk of tokens.
struct ChunkShape {
  int64_t tokens, tiles, blocks, mask_words, neuron_tiles, token_blocks;

  explicit ChunkShape(const FfnTrainShapeCuda& shape)
      : tokens(std::min<int64_t>(shape.max_tokens, kChunkTokens)),
        tiles(TileUnionWorkspace::max_tiles(tokens)),
        blocks(ceil_div(shape.ffn, kBlock)),
        mask_words(ceil_div(shape.ffn, kGateTile) * 8),
        neuron_tiles(ceil_div(shape.ffn, kNeuronTile)),
        token_blocks(ceil_div(tokens, kBlock)) {}
  int64_t all_blocks() const { return tiles * blocks; }
  // A union has at most as many neurons as its tile has active pairs. Each tile rounds up to
  // blocks.
  int64_t most_blocks(int64_t pairs) const {
    return std::min(all_blocks(), ceil_div(pairs, kBlock) + tiles);
  }
};

// What one chunk of one layer keeps. Pointers are arrays off `carver`, null where it only counts.
struct SavedChunk {
  Tiles tiles{};
  Kept kept{};
  int64_t zero_bytes;  // from kept.state on, which must be 0 before forward

  SavedChunk(const FfnTrainShapeCuda& shape, HybridCapacityCuda capacity, Carver& carver) {
    const ChunkShape chunk(shape);
    const int64_t begin = carver.bytes();
    kept.state = carver.take<KeptState>(1);
    tiles.counts = carver.take<tile_union::Counts>(1);
    tiles.marked = carver.take<int32_t>(chunk.tiles);
    zero_bytes = carver.bytes() - begin;
    kept.capacity = capacity.pairs;
    kept.block_capacity = static_cast<int>(capacity.blocks);
    kept.values = carver.take<uint32_t>(capacity.pairs);
    kept.masks = carver.take<uint4>(int64_t{kept.block_capacity} * kBlock);
    kept.offsets = carver.take<uint32_t>(kept.block_capacity);
    tiles.tokens = carver.take<int32_t>(chunk.tiles * kTileTokens);
    tiles.mask = carver.take<uint32_t>(chunk.tiles * chunk.mask_words);
    tiles.before = carver.take<uint32_t>(chunk.tiles * chunk.mask_words);
    tiles.union_size = carver.take<int32_t>(chunk.tiles);
    tiles.first_block = carver.take<int32_t>(chunk.tiles);
    tiles.union_ids = carver.take<int32_t>(chunk.all_blocks() * kBlock);
    tiles.order = carver.take<int32_t>(chunk.tiles);
    tiles.up_items =
        carver.take<int2>(chunk.tiles * ceil_div(chunk.blocks, tile_union::kMaxChunkBlocks));
    tiles.heavy = carver.take<uint4>(chunk.tiles);
    tiles.blocks = static_cast<int>(chunk.blocks);
  }
};

// Memory of one chunk in flight, arrays off `carver` too.
struct HybridWorkspace {
  double* l1_parts;  // [blocks]
  // On tiles of tokens, [blocks, kTileTokens, kBlock]: g, then h; u, then d_u; d_h, then d_g.
  __nv_bfloat16* images[3];
  uint4* masks;      // [blocks, kBlock]
  TwellPacked gate;  // in the memory of neurons.images, which are needed later
  NeuronTiles neurons{};
  int64_t zero_bytes;  // from neurons.nnz on, which must be 0 before backward

  HybridWorkspace(const FfnTrainShapeCuda& shape, Carver& carver) {
    const ChunkShape chunk(shape);
    carver.take<std::byte>(256);  // the dense execution's ticket, which stays 0
    l1_parts = carver.take<double>(chunk.all_blocks());
    for (auto& image : images) {
      image = carver.take<__nv_bfloat16>(chunk.all_blocks() * kBlockValues);
    }
    masks = carver.take<uint4>(chunk.all_blocks() * kBlock);

    neurons.ffn = static_cast<int>(shape.ffn);
    neurons.max_tiles = static_cast<int>(chunk.neuron_tiles);
    neurons.words = static_cast<int>(chunk.tiles) * (kTileTokens / 32);
    neurons.products = shape.gated ? 3 : 2;
    neurons.columns = static_cast<int>(ceil_div(shape.width, tile_union::kColumns));
    const int64_t zero_begin = carver.bytes();
    neurons.nnz = carver.take<int32_t>(shape.ffn);
    neurons.size = carver.take<int32_t>(chunk.neuron_tiles);
    neurons.turns =
        carver.take<int32_t>(chunk.neuron_tiles * neurons.products * neurons.columns * 2);
    neurons.counts = carver.take<NeuronCounts>(1);
    zero_bytes = carver.bytes() - zero_begin;
    neurons.order = carver.take<int32_t>(chunk.neuron_tiles * kNeuronTile);
    neurons.mask = carver.take<uint32_t>(chunk.neuron_tiles * neurons.words);
    neurons.positions = carver.take<int32_t>(chunk.neuron_tiles * chunk.tiles * kNeuronTile);
    neurons.first_block = carver.take<int32_t>(chunk.neuron_tiles);
    neurons.ids = carver.take<int32_t>(chunk.neuron_tiles * chunk.token_blocks * kBlock);
    neurons.entries = carver.take<int4>(chunk.neuron_tiles * chunk.token_blocks);

    const int64_t shared_begin = carver.bytes();
    const int64_t image = chunk.neuron_tiles * chunk.token_blocks * kNeuronTile * kBlock;
    auto* first = carver.take<__nv_bfloat16>(neurons.products * image);
    for (int p = 0; p < neurons.products; ++p) {
      neurons.images[p] = first != nullptr ? first + p * image : nullptr;
    }
    gate.shape = {chunk.tokens, shape.ffn, kGateTile, kCompression};
    Carver over = device_carver(reinterpret_cast<std::byte*>(first));
    gate.words = over.take<uint32_t>(gate.shape.words());
    gate.spill_slots = gate.shape.max_spill_slots();
    gate.spill = over.take<BF16>(gate.spill_slots * kGateTile);
    gate.row_nnz = over.take<int32_t>(chunk.tokens);
    const int64_t missing = shared_begin + over.bytes() - carver.bytes();
    if (missing > 0) carver.take<std::byte>(missing);
  }
  static HybridWorkspace of(const FfnTrainWorkspaceCuda& workspace) {
    Carver carver = device_carver(workspace.memory);
    return {workspace.shape, carver};
  }
};

// A chunk of a call: its tiles, with images in the workspace, and its gate.
struct HybridChunk {
  int64_t begin, tokens;
  Tiles tiles;
  Kept kept;
  int64_t zero_bytes;        // from kept.state on, which must be 0 before forward
  TwellPacked made;          // output of the gate GEMM
  tile_union::Gate pattern;  // what later kernels read: `made`, or the activations to replay

  HybridChunk(const FfnSavedCuda& saved, const HybridWorkspace& work, int64_t index,
              int64_t all_tokens, const TwellPacked& replay)
      : begin(index * kChunkTokens), tokens(std::min<int64_t>(kChunkTokens, all_tokens - begin)) {
    Carver carver = device_carver(saved.memory);
    for (int64_t i = 0; i < index; ++i) SavedChunk(saved.shape, saved.capacity, carver);
    const SavedChunk own(saved.shape, saved.capacity, carver);
    tiles = own.tiles;
    kept = own.kept;
    zero_bytes = own.zero_bytes;
    tiles.activations = work.images[0];
    tiles.max_tiles = static_cast<int>(TileUnionWorkspace::max_tiles(tokens));
    made = work.gate;
    made.shape.rows = tokens;
    TwellPacked used = made;
    if (replay.words != nullptr) {
      used = replay;
      used.shape.rows = tokens;
      used.words += begin * used.shape.row_words();
      used.row_nnz += begin;
    }
    pattern = {used.words,
               reinterpret_cast<const uint4*>(used.spill),
               used.row_nnz,
               static_cast<int>(tokens),
               static_cast<int>(used.shape.tiles()),
               used.shape.slots()};
  }
};

tile_union::Up up_product(const HybridChunk& chunk, const FfnTrainShapeCuda& shape,
                          const __nv_bfloat16* x, const __nv_bfloat16* weight,
                          __nv_bfloat16* product, int32_t* taken,
                          tile_union::Condition condition = nullptr) {
  tile_union::Up up{};
  up.x = x + chunk.begin * shape.width;
  up.map_x = gpu::matrix_tensor_map(up.x, chunk.tokens, shape.width, tile_union::kTileTokens);
  up.tiles = chunk.tiles;
  up.weight = weight;
  up.product = product;
  up.taken = taken;
  up.width = static_cast<int>(shape.width);
  up.condition = condition;
  return up;
}

GateGemmCuda gate_gemm(const HybridChunk& chunk, const FfnTrainShapeCuda& shape,
                       const FfnWeightsCuda& weights, const __nv_bfloat16* x) {
  return {.tokens = chunk.tokens,
          .width = shape.width,
          .ffn = shape.ffn,
          .x = x + chunk.begin * shape.width,
          .w_gate = shape.gated ? weights.w_gate : weights.w_up,
          .out = chunk.made,
          .cut = bf16_cut(weights.activation, weights.threshold)};
}

void forward_chunk(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                   const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
                   const HybridWorkspace& work) {
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  KeptState* state = chunk.kept.state;
  TWELL_CUDA_CHECK(cudaMemsetAsync(state, 0, static_cast<size_t>(chunk.zero_bytes), stream));
  gate_gemm_cuda(ctx, gate_gemm(chunk, shape, problem.weights, problem.x));
  TWELL_CUDA_CHECK(tile_union::launch_find_unions(chunk.pattern, chunk.tiles, &state->activity,
                                                  nullptr, 0, ctas, stream));
  TWELL_CUDA_CHECK(tile_union::launch_place_gates(chunk.pattern, chunk.tiles, ctas, stream));
  if (shape.gated) {
    TWELL_CUDA_CHECK(tile_union::launch_up_sm90(
        up_product(chunk, shape, problem.x, problem.weights.w_up, work.images[1], &state->up_taken),
        ctas, stream));
  }
  TWELL_CUDA_CHECK(launch_keep({.tiles = chunk.tiles,
                                .u = shape.gated ? work.images[1] : nullptr,
                                .kept = chunk.kept,
                                .l1_parts = work.l1_parts,
                                .counts = problem.counts,
                                .active = problem.active,
                                .squared = problem.weights.activation == Activation::kRelu2,
                                .up_relu = problem.weights.activation == Activation::kDRelu},
                               ctas, stream));
  TWELL_CUDA_CHECK(tile_union::launch_down_sm90({.tiles = chunk.tiles,
                                                 .weight = problem.weights.w_down,
                                                 .y = problem.y + chunk.begin * shape.width,
                                                 .taken = &state->down_taken,
                                                 .width = static_cast<int>(shape.width)},
                                                ctas, stream));
}

// Computes g and u of a chunk again, on the device's condition that not everything could be kept.
void recompute(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
               const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
               const HybridWorkspace& work) {
  const tile_union::Condition overflow = &chunk.kept.state->overflow;
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  GateGemmCuda gate = gate_gemm(chunk, shape, problem.weights, problem.x);
  gate.condition = overflow;
  gate_gemm_cuda(ctx, gate);
  TWELL_CUDA_CHECK(
      tile_union::launch_place_gates(chunk.pattern, chunk.tiles, ctas, stream, overflow));
  if (!shape.gated) return;
  TWELL_CUDA_CHECK(tile_union::launch_up_sm90(
      up_product(chunk, shape, problem.x, problem.weights.w_up, work.images[1],
                 &work.neurons.counts->again_taken, overflow),
      ctas, stream));
}

void backward_chunk(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                    const FfnTrainShapeCuda& shape, const HybridChunk& chunk,
                    const HybridWorkspace& work) {
  const cudaStream_t stream = ctx.stream();
  const int ctas = ctx.multiprocessors();
  const FfnWeightsCuda& weights = problem.weights;
  const auto& [h, d_u, d_g] = work.images;
  const __nv_bfloat16* x = problem.x + chunk.begin * shape.width;
  const __nv_bfloat16* d_y = problem.d_y + chunk.begin * shape.width;
  TWELL_CUDA_CHECK(
      cudaMemsetAsync(work.neurons.nnz, 0, static_cast<size_t>(work.zero_bytes), stream));
  recompute(ctx, problem, shape, chunk, work);
  TWELL_CUDA_CHECK(tile_union::launch_up_sm90(
      up_product(chunk, shape, problem.d_y, weights.w_down, d_g, &work.neurons.counts->up_taken),
      ctas, stream));
  TWELL_CUDA_CHECK(launch_expand({.tiles = chunk.tiles,
                                  .d_u = shape.gated ? d_u : nullptr,
                                  .d_g = d_g,
                                  .kept = chunk.kept,
                                  .masks = work.masks,
                                  .neuron_nnz = work.neurons.nnz,
                                  .l1_scale = problem.l1_scale,
                                  .squared = weights.activation == Activation::kRelu2,
                                  .up_relu = weights.activation == Activation::kDRelu},
                                 ctas, stream));
  tile_union::Down down{};
  down.tiles = chunk.tiles;
  down.tiles.activations = d_g;
  down.weight = shape.gated ? weights.w_gate : weights.w_up;
  if (shape.gated) {
    down.activations2 = d_u;
    down.weight2 = weights.w_up;
  }
  down.y = problem.d_x + chunk.begin * shape.width;
  down.taken = &work.neurons.counts->down_taken;
  down.width = static_cast<int>(shape.width);
  TWELL_CUDA_CHECK(tile_union::launch_down_sm90(down, ctas, stream));

  // Without a gate d_g holds the gradient of x w_up^T.
  Transpose transpose{chunk.tiles, chunk.kept, work.masks, {d_g, d_u, h}, work.neurons};
  WeightGrads grads{work.neurons,
                    {x, x, d_y},
                    {problem.grads.w_gate, problem.grads.w_up, problem.grads.w_down},
                    static_cast<int>(shape.width),
                    problem.grads.add || chunk.begin > 0};
  if (!shape.gated) {
    transpose.images[1] = h;
    grads.right[1] = d_y;
    grads.grads[0] = problem.grads.w_up;
    grads.grads[1] = problem.grads.w_down;
  }
  if (!grads.add) TWELL_CUDA_CHECK(launch_clear_idle(grads, stream));
  TWELL_CUDA_CHECK(launch_rank_neurons(work.neurons, stream));
  TWELL_CUDA_CHECK(launch_neuron_unions(transpose, ctas, stream));
  TWELL_CUDA_CHECK(launch_transpose(transpose, ctas, stream));
  TWELL_CUDA_CHECK(launch_weight_grads(grads, ctas, stream));
}

}  // namespace

int64_t hybrid_saved_bytes(const FfnTrainShapeCuda& shape, HybridCapacityCuda capacity) {
  Carver carver = device_carver();
  for (int64_t begin = 0; begin < shape.max_tokens; begin += kChunkTokens) {
    SavedChunk(shape, capacity, carver);
  }
  return carver.bytes();
}

int64_t hybrid_workspace_bytes(const FfnTrainShapeCuda& shape) {
  Carver carver = device_carver();
  HybridWorkspace(shape, carver);
  return carver.bytes();
}

HybridCapacityCuda hybrid_capacity(const FfnTrainShapeCuda& shape, double nnz,
                                   double union_neurons) {
  // 1.5 times what is expected, because chunks and steps differ.
  constexpr double kSlack = 1.5;
  const ChunkShape chunk(shape);
  const auto tokens = static_cast<double>(chunk.tokens);
  // The index of a block's first value has 32 bits.
  const double most =
      std::min(tokens * static_cast<double>(shape.ffn), static_cast<double>(UINT32_MAX));
  HybridCapacityCuda capacity;
  capacity.pairs = static_cast<int64_t>(std::min(std::max(nnz, 1.0) * kSlack * tokens, most));
  // Each tile rounds up to whole blocks; one more block covers that.
  const double blocks_of_tile = kSlack * std::max(union_neurons, 1.0) / kBlock + 1.0;
  const auto expected = static_cast<int64_t>(blocks_of_tile * static_cast<double>(chunk.tiles));
  const auto set_blocks = [&] {
    const int64_t possible = chunk.most_blocks(capacity.pairs);
    capacity.blocks = union_neurons < 0.0 ? possible : std::min(possible, expected);
  };
  set_blocks();
  const int64_t dense = dense_saved_bytes(shape);
  while (capacity.pairs > 0 && hybrid_saved_bytes(shape, capacity) > dense) {
    capacity.pairs /= 2;
    set_blocks();
  }
  return capacity;
}

void hybrid_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem, FfnSavedCuda& saved,
                         FfnTrainWorkspaceCuda& workspace) {
  const TwellPacked& replay = problem.replay;
  TWELL_CHECK(replay.words == nullptr ||
                  (replay.shape.rows >= problem.tokens && replay.shape.cols == saved.shape.ffn &&
                   replay.shape.tile == kGateTile && replay.shape.slots() >= 4),
              "replayed TwELL of [{}, {}] for [{}, {}]", replay.shape.rows, replay.shape.cols,
              problem.tokens, saved.shape.ffn);
  const HybridWorkspace work = HybridWorkspace::of(workspace);
  for (int64_t i = 0; i * kChunkTokens < problem.tokens; ++i) {
    const HybridChunk chunk(saved, work, i, problem.tokens, replay);
    forward_chunk(ctx, problem, saved.shape, chunk, work);
  }
  saved.replay = replay;
}

void hybrid_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                          FfnSavedCuda& saved, FfnTrainWorkspaceCuda& workspace) {
  const HybridWorkspace work = HybridWorkspace::of(workspace);
  for (int64_t i = 0; i * kChunkTokens < problem.tokens; ++i) {
    const HybridChunk chunk(saved, work, i, problem.tokens, saved.replay);
    backward_chunk(ctx, problem, saved.shape, chunk, work);
  }
}

}  // namespace twell::ffn_train
