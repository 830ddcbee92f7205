// SPDX-License-Identifier: Apache-2.0
// The elementwise steps of the hybrid execution, between images on the unions and what is kept of
// them. A CTA works on a block of 128 tokens by 64 neurons at a time: pieces of eight neurons,
// which lie in the same order in all images, then 32 tokens of one neuron per thread.
#include <cstdint>

#include "twell/ops/ffn/hopper/schedule_sm90.cuh"
#include "twell/ops/ffn_train/hidden_pairs.cuh"
#include "twell/ops/ffn_train/hybrid_train.h"
#include "twell/ops/ffn_train/union_blocks.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::ffn_train {
namespace {

using tile_union::block_scan;

constexpr int kThreads = kBlockThreads;
constexpr int kCtasPerMultiprocessor = 5;

// By the CTA that is done last.
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
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
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
      const uint4 u = up != nullptr ? up[piece] : uint4{kOnes, kOnes, kOnes, kOnes};
      const uint32_t fired = fired_bits(g);
      values.put_fired(piece, fired);
      if (fired == 0) continue;
      values.g[piece] = g;
      values.u[piece] = u;
      gate[piece] = {hidden_pair(g.x, u.x, l1), hidden_pair(g.y, u.y, l1),
                     hidden_pair(g.z, u.z, l1), hidden_pair(g.w, u.w, l1)};
    }
    const double sum = block_sum<kThreads>(static_cast<double>(l1));  // barriers in it
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

// g and u of a block as images in shared memory, from what was kept; returns this thread's tokens.
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
  from += block_scan<kThreads>(__popc(tokens), values.scratch, total);  // barriers in it
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

// The same from the images that were made anew.
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
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  index.load(expand.tiles);
  const bool overflow = expand.kept.state->overflow != 0;
  const float l1_scale = *expand.l1_scale;
  for (int block = blockIdx.x; block < index.blocks; block += gridDim.x) {
    uint4* h = block_pieces(expand.tiles.activations, block);
    uint4* d_u = expand.d_u != nullptr ? block_pieces(expand.d_u, block) : nullptr;
    uint4* d_g = block_pieces(expand.d_g, block);
    uint4 hidden[kPieces];  // d_h, fetched ahead
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
        backward_eight(hidden[i], g, u, l1_scale);
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

}  // namespace

cudaError_t launch_keep(const Keep& keep, int ctas, cudaStream_t stream) {
  return sm90::launch_dependent(keep_kernel, dim3(ctas * kCtasPerMultiprocessor), kThreads, 0,
                                stream, keep);
}

cudaError_t launch_expand(const Expand& expand, int ctas, cudaStream_t stream) {
  return sm90::launch_dependent(expand_kernel, dim3(ctas * kCtasPerMultiprocessor), kThreads, 0,
                                stream, expand);
}

}  // namespace twell::ffn_train
