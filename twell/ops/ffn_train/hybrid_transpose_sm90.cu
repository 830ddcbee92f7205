// SPDX-License-Identifier: Apache-2.0
// From images on token tiles to images on neuron tiles: the values.
#include <cstdint>

#include "twell/ops/ffn/hopper/schedule_sm90.cuh"
#include "twell/ops/ffn_train/hybrid_train.h"
#include "twell/ops/ffn_train/union_blocks.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::ffn_train {
namespace {

using tile_union::block_scan;

constexpr int kTransposeThreads = 256;
constexpr int kTransposeCtas = 4;
constexpr int kImageBytes = kNeuronTile * kBlock * 2;
constexpr int kMaxWords = kMaxChunkTiles * (kTileTokens / 32);

// The tokens of a neuron tile. In shared memory.
struct TileTokens {
  uint32_t mask[kMaxWords];
  int before[kMaxWords];  // tokens in words below
  int scratch[kTransposeThreads / 32];
  int words, size;

  // By all threads; begins and ends with a barrier.
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
  // The word that holds a position: the last one that begins at or before it.
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
  int3 tile;  // and where its blocks begin and end
  int block;
};

// Values of one neuron in 32 slots of a token tile, into the staged row of the neuron.
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

// CTAs take blocks first come first served: they differ in cost.
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
  // Of four words of a token tile, a thread has two that are not neighbours, since a block often
  // needs half a tile only.
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

cudaError_t launch_transpose(const Transpose& transpose, int ctas, cudaStream_t stream) {
  return transpose.neurons.products == 3 ? launch_transpose_of<3>(transpose, ctas, stream)
                                         : launch_transpose_of<2>(transpose, ctas, stream);
}

}  // namespace twell::ffn_train
