// SPDX-License-Identifier: Apache-2.0
// keep and expand of hybrid training (hybrid.cu): elementwise, on tiles of tokens.
#include "twell/ops/ffn_train/hybrid_kernels.cuh"

namespace twell::ffn_train {
namespace {

// A CTA handles one block of 128 tokens by 64 neurons at a time: first in pieces of eight neurons,
// which have the same order in all images, then with 32 tokens of one neuron per thread.

constexpr int kThreads = 256;
constexpr int kCtasPerMultiprocessor = 5;
// Of __launch_bounds__: GPUs of fewer threads per SM have less shared memory too.
constexpr int kLeastCtas = gpu::kSmThreads < 2048 ? 2 : kCtasPerMultiprocessor;

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

__global__ void __launch_bounds__(kThreads, kLeastCtas) keep_kernel(Keep keep) {
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
  const int thread = static_cast<int>(gpu::opaque(threadIdx.x));
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = thread + i * kThreads;
    values.g[piece] = g[piece];
    values.u[piece] = u != nullptr ? u[piece] : uint4{kOnes, kOnes, kOnes, kOnes};
    values.put_fired(piece, fired_bits(values.g[piece]));
  }
  __syncthreads();
  const uint32_t tokens = values.tokens_of_thread();
  reinterpret_cast<uint32_t*>(expand.masks)[int64_t{block} * kThreads + threadIdx.x] = tokens;
  return tokens;
}

__global__ void __launch_bounds__(kThreads, kLeastCtas) expand_kernel(Expand expand) {
  __shared__ BlockIndex index;
  __shared__ BlockValues values;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  index.load(expand.tiles);
  const bool overflow = expand.kept.state->overflow != 0;
  const float l1_scale = *expand.l1_scale;
  for (int block = blockIdx.x; block < index.blocks; block += gridDim.x) {
    uint4 hidden[kPieces];  // d_h, loaded early to hide the latency
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      hidden[i] = block_pieces(expand.d_g, block)[threadIdx.x + i * kThreads];
    }
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
      block_pieces(expand.tiles.activations, block)[piece] = hidden[i];
      block_pieces(expand.d_g, block)[piece] = g;
      if (expand.d_u != nullptr) block_pieces(expand.d_u, block)[piece] = u;
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_keep(const Keep& keep, int ctas, cudaStream_t stream) {
  return gpu::launch_dependent(keep_kernel, dim3(ctas * kCtasPerMultiprocessor), kThreads, 0,
                               stream, keep);
}

cudaError_t launch_expand(const Expand& expand, int ctas, cudaStream_t stream) {
  return gpu::launch_dependent(expand_kernel, dim3(ctas * kCtasPerMultiprocessor), kThreads, 0,
                               stream, expand);
}

}  // namespace twell::ffn_train
