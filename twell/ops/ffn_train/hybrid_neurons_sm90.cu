// SPDX-License-Identifier: Apache-2.0
// The weight gradients of the hybrid execution, on tiles of neurons: which neurons make which tile
// (rank), which tokens each tile needs (neuron_unions), the values, from images on tiles of tokens
// to images on tiles of neurons (transpose), and the products with those (weight_grads). Neurons
// and tokens have a fixed order, so that sums repeat bit for bit.
#include <cstdint>

#include "twell/ops/ffn/hopper/gathered_gemm_sm90.cuh"
#include "twell/ops/ffn_train/ffn_train_parts_cuda.h"
#include "twell/sm90/block_scan.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::ffn_train {
namespace {

using sm90::block_scan;
using tile_union::kBlock;
using tile_union::kTileTokens;

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
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
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
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
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
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
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
  return sm90::launch_dependent(kernel, dim3(ctas * kTransposeCtas), kTransposeThreads,
                                sizeof(TransposeShared), stream, transpose);
}

}  // namespace

cudaError_t launch_rank_neurons(const NeuronTiles& neurons, cudaStream_t stream) {
  return sm90::launch_dependent(rank_neurons_kernel, dim3(1), kRankThreads, 0, stream, neurons);
}

cudaError_t launch_neuron_unions(const Transpose& transpose, int ctas, cudaStream_t stream) {
  const dim3 grid(kUnionParts, static_cast<unsigned>(transpose.neurons.max_tiles));
  return sm90::launch_dependent(neuron_unions_kernel, grid, kUnionThreads, 0, stream, transpose,
                                mask_words(transpose.neurons), ctas);
}

cudaError_t launch_transpose(const Transpose& transpose, int ctas, cudaStream_t stream) {
  return transpose.neurons.products == 3 ? launch_transpose_of<3>(transpose, ctas, stream)
                                         : launch_transpose_of<2>(transpose, ctas, stream);
}

// --- weight_grads ---

// Weight gradients of the hybrid execution: grads[p] [neurons of a tile] += images[p][tile]
// right[p][tokens of the tile]. An item is a piece of one such sum, for 128 neurons by 256 columns.
// The pieces of a sum are added to the gradients in their order, so that results repeat: the CTA
// with a later piece waits until the piece before it is added. This ends however few CTAs run at a
// time. A CTA takes items only while it runs, and works on them in ascending order. So the lowest
// item that is not done is the next one of a running CTA, and waits for none. Where gradients are
// overwritten, the first piece of a sum is stored and the others are added.
namespace {

namespace gathered = tile_union::gathered;
using tile_union::kColumns;

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
          while (sm90::load_acquire(turn) != piece) {
          }
        }
        sm90::named_barrier(1 + warpgroup, 128);
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
        sm90::named_barrier(1 + warpgroup, 128);
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
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  if (grads.neurons.nnz[blockIdx.x] != 0) return;
  const int pieces = grads.width / 4;
  for (int p = 0; p < grads.neurons.products; ++p) {
    auto* row = reinterpret_cast<float4*>(grads.grads[p]) + int64_t{blockIdx.x} * pieces;
    for (int i = threadIdx.x; i < pieces; i += kClearThreads) row[i] = float4{};
  }
}

}  // namespace

cudaError_t launch_clear_idle(const WeightGrads& grads, cudaStream_t stream) {
  return sm90::launch_dependent(clear_idle_kernel, dim3(static_cast<unsigned>(grads.neurons.ffn)),
                                kClearThreads, 0, stream, grads);
}

cudaError_t launch_weight_grads_sm90(const WeightGrads& grads, int ctas, cudaStream_t stream) {
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

}  // namespace twell::ffn_train
