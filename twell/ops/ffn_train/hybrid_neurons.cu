// SPDX-License-Identifier: Apache-2.0
// Tiles of neurons of hybrid training (hybrid.cu): rank, neuron_unions, transpose.
#include "twell/ops/ffn_train/hybrid_kernels.cuh"

namespace twell::ffn_train {
namespace {

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

}  // namespace

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

}  // namespace twell::ffn_train
