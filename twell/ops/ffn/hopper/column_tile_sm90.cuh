// SPDX-License-Identifier: Apache-2.0
// What find_unions makes of the packed activations of 128 tokens by 256 neurons.
#pragma once

#include <cstdint>

#include "twell/ops/ffn/hopper/union_pieces_sm90.cuh"
#include "twell/ops/ffn/tile_union.h"

namespace twell::tile_union {

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
  // 3 of it, the count among them; next: the four behind, where there are as many.
  __device__ __forceinline__ void add(const uint4* source, const uint4& head, const uint4& next,
                                      int non_zeros, int slot) const {
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

// Spilled tiles come in bunches; whole warps share them out, 8 values per lane.
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
      if (at < tiles) values[j] = gate.spill[int64_t{list[at].y} * 32 + lane];
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

}  // namespace twell::tile_union
