// SPDX-License-Identifier: Apache-2.0
// The elementwise steps of the hybrid execution, between images on the unions and what is kept of
// them. A CTA works on a block of 128 tokens by 64 neurons at a time, a thread per token.
#include <cstdint>

#include "twell/ops/ffn_train/hidden_pairs.cuh"
#include "twell/ops/ffn_train/hybrid_train.h"
#include "twell/ops/ffn_train/union_blocks.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::ffn_train {
namespace {

constexpr int kThreads = kTileTokens;
constexpr int kCtasPerMultiprocessor = 6;

// The value of a neuron in a row of a block.
__device__ __forceinline__ uint32_t value_at(const uint4* row, int column) {
  const uint4* piece = row + ((column / 8) ^ (threadIdx.x % 8));
  return reinterpret_cast<const uint16_t*>(piece)[column % 8];
}

__device__ void store_values(const Kept& kept, const BlockPattern& pattern, uint64_t fired,
                             unsigned long long offset, const uint4* g, const uint4* u) {
  for (uint64_t left = fired; left != 0; left &= left - 1) {
    const int column = __ffsll(static_cast<long long>(left)) - 1;
    const uint32_t up = u != nullptr ? value_at(u, column) : kOnes & 0xffff;
    kept.values[offset + pattern.place(column)] = value_at(g, column) | up << 16;
  }
}

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
  keep.counts->max_row_nnz =
      max(keep.counts->max_row_nnz, static_cast<int32_t>(state.activity.max_row_nnz));
  keep.counts->recomputed += *reinterpret_cast<const volatile int32_t*>(&state.overflow);
}

__global__ void __launch_bounds__(kThreads) keep_kernel(Keep keep) {
  __shared__ BlockIndex index;
  __shared__ BlockPattern pattern;
  __shared__ unsigned long long block_offset;
  __shared__ bool last;
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  index.load(keep.tiles);
  KeptState& state = *keep.kept.state;
  const int row = threadIdx.x;
  for (int block = blockIdx.x; block < index.blocks; block += gridDim.x) {
    const int tile = index.tile_of(block);
    uint4* g = image_row(keep.tiles.activations, block, row);
    const uint4* u =
        keep.u != nullptr ? image_row(const_cast<__nv_bfloat16*>(keep.u), block, row) : nullptr;
    uint64_t fired = 0;
#pragma unroll
    for (int q = 0; q < kBlock / 8; ++q) {
      fired |= uint64_t{fired_bits(g[q ^ (row % 8)])} << (8 * q);
    }
    pattern.vote(fired);
    const int total = pattern.scan();
    if (threadIdx.x == 0) {
      block_offset = atomicAdd(&state.used, static_cast<unsigned long long>(total));
    }
    __syncthreads();
    const unsigned long long offset = block_offset;
    if (offset + total <= static_cast<unsigned long long>(keep.kept.capacity) &&
        block < keep.kept.block_capacity) {
      if (threadIdx.x < kBlock) {
        keep.kept.masks[int64_t{block} * kBlock + threadIdx.x] =
            *reinterpret_cast<const uint4*>(pattern.words[threadIdx.x]);
      }
      if (threadIdx.x == 0) keep.kept.offsets[block] = static_cast<uint32_t>(offset);
      store_values(keep.kept, pattern, fired, offset, g, u);
    } else if (threadIdx.x == 0) {
      state.overflow = 1;
    }
    if (keep.active != nullptr && threadIdx.x < kBlock) {
      const int position = (block - index.first[tile]) * kBlock + threadIdx.x;
      if (position < keep.tiles.union_size[tile]) {
        uint8_t* flag = keep.active + keep.tiles.union_ids[int64_t{block} * kBlock + threadIdx.x];
        if (*flag == 0) *flag = 1;
      }
    }
    float l1 = 0.0f;
#pragma unroll
    for (int q = 0; q < kBlock / 8; ++q) {
      if ((fired >> (8 * q) & 0xff) == 0) continue;
      uint4& piece = g[q ^ (row % 8)];
      const uint4 gate = piece;
      const uint4 up = u != nullptr ? u[q ^ (row % 8)] : uint4{kOnes, kOnes, kOnes, kOnes};
      piece = {hidden_pair(gate.x, up.x, l1), hidden_pair(gate.y, up.y, l1),
               hidden_pair(gate.z, up.z, l1), hidden_pair(gate.w, up.w, l1)};
    }
    const double sum = block_sum<kThreads>(static_cast<double>(l1));  // a barrier in it
    if (threadIdx.x == 0) keep.l1_parts[block] = sum;
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

// g and u of eight neurons from the values that were kept.
__device__ __forceinline__ void kept_eight(const uint32_t* values, const BlockPattern& pattern,
                                           uint32_t fired, int first_column, uint4& g, uint4& u) {
  uint32_t gate[4] = {}, up[4] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if ((fired >> j & 1) == 0) continue;
    const uint32_t value = values[pattern.place(first_column + j)];
    gate[j / 2] |= (value & 0xffff) << (j % 2 * 16);
    up[j / 2] |= (value >> 16) << (j % 2 * 16);
  }
  g = {gate[0], gate[1], gate[2], gate[3]};
  u = {up[0], up[1], up[2], up[3]};
}

__global__ void __launch_bounds__(kThreads) expand_kernel(Expand expand) {
  __shared__ BlockIndex index;
  __shared__ BlockPattern pattern;
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  index.load(expand.tiles);
  const bool overflow = expand.kept.state->overflow != 0;
  const float l1_scale = *expand.l1_scale;
  const int row = threadIdx.x;
  for (int block = blockIdx.x; block < index.blocks; block += gridDim.x) {
    const int tile = index.tile_of(block);
    const int64_t column = int64_t{block} * kBlock + threadIdx.x;
    uint4* h = image_row(expand.tiles.activations, block, row);
    uint4* d_u = expand.d_u != nullptr ? image_row(expand.d_u, block, row) : nullptr;
    uint4* d_g = image_row(expand.d_g, block, row);
    uint64_t fired = 0;
    if (overflow) {
      for (int q = 0; q < kBlock / 8; ++q) {
        fired |= uint64_t{fired_bits(h[q ^ (row % 8)])} << (8 * q);
      }
      pattern.vote(fired);
    } else if (threadIdx.x < kBlock) {
      *reinterpret_cast<uint4*>(pattern.words[threadIdx.x]) = expand.kept.masks[column];
    }
    pattern.scan();
    if (overflow) {
      if (threadIdx.x < kBlock) {
        expand.masks[column] = *reinterpret_cast<const uint4*>(pattern.words[threadIdx.x]);
      }
    } else {
      fired = pattern.fired();
    }
    if (threadIdx.x < kBlock) {
      const int position = (block - index.first[tile]) * kBlock + threadIdx.x;
      if (position < expand.tiles.union_size[tile]) {
        atomicAdd(&expand.neuron_nnz[expand.tiles.union_ids[column]], pattern.count(threadIdx.x));
      }
    }
    const uint32_t* values = expand.kept.values + (overflow ? 0 : expand.kept.offsets[block]);
#pragma unroll
    for (int q = 0; q < kBlock / 8; ++q) {
      const int at = q ^ (row % 8);
      const auto bits = static_cast<uint32_t>(fired >> (8 * q) & 0xff);
      uint4 hidden{}, gate{}, up{};
      if (bits != 0) {
        hidden = d_g[at];
        if (!overflow) {
          kept_eight(values, pattern, bits, 8 * q, gate, up);
        } else {
          gate = h[at];
          up = d_u != nullptr ? d_u[at] : uint4{kOnes, kOnes, kOnes, kOnes};
        }
        backward_eight(hidden, gate, up, l1_scale);
      }
      h[at] = hidden;
      d_g[at] = gate;
      if (d_u != nullptr) d_u[at] = up;
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
