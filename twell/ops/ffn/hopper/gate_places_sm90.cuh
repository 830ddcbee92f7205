// SPDX-License-Identifier: Apache-2.0
// The gate compacted onto a part of a tile's union, as an image in shared memory.
#pragma once

#include <cstdint>

#include "twell/ops/ffn/tile_union.h"

namespace twell::tile_union::up {

inline constexpr uint32_t kBlockBytes = kTileTokens * kBlock * 2;  // one block of activations

// Puts the gate where an item's neurons have their places in the image.
struct GatePlaces {
  const int first, count;  // positions in the tile's union
  const uint32_t image;    // in shared memory
  const uint32_t words;    // in shared memory: {mask, neurons below}, a window of words

  __device__ __forceinline__ uint32_t piece(int block, int row, int index) const {
    return image + block * kBlockBytes + row * 128 + (index ^ (row % 8)) * 16;
  }
  __device__ __forceinline__ void clear(int blocks, int row) const {
    for (int i = 0; i < blocks * 8; ++i) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(piece(i / 8, row, i % 8)),
                   "r"(0)
                   : "memory");
    }
  }
  // word: in the window; bit: the neuron's in it; row: the token's slot.
  __device__ __forceinline__ void put(int word, int bit, int row, uint32_t bits) const {
    uint32_t mask, before;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(mask), "=r"(before)
                 : "r"(words + word * 8)
                 : "memory");
    const int position = static_cast<int>(before) - first + __popc(mask & ((1u << bit) - 1));
    if (static_cast<uint32_t>(position) < static_cast<uint32_t>(count)) {
      put_at(position, row, bits);
    }
  }
  __device__ __forceinline__ void put_at(int position, int row, uint32_t bits) const {
    const uint32_t at = piece(position / kBlock, row, position % kBlock / 8) + position % 8 * 2;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(static_cast<uint16_t>(bits)) : "memory");
  }
  // By a warp: a column tile whose first word is `base`, of which `listed` entries are listed.
  __device__ __forceinline__ void put_listed(const uint32_t* entries, int listed, int base) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < listed; i += 32 * kAhead) {
      uint32_t next[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) next[j] = i + 32 * j < listed ? entries[i + 32 * j] : 0;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + 32 * j >= listed) break;
        put(base + next[j] / 32 % 8, next[j] % 32, next[j] >> 8 & 127, next[j] >> 16);
      }
    }
  }
  // By a thread: one token's words of a column tile.
  __device__ __forceinline__ void put_packed(const uint4* source, int non_zeros, int base,
                                             int row) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = 0; i <= non_zeros; i += 4 * kAhead) {
      uint4 next[kAhead] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + 4 * j <= non_zeros) next[j] = source[i / 4 + j];
      }
#pragma unroll
      for (int j = 0; j < 4 * kAhead; ++j) {
        const uint4& of = next[j / 4];
        const uint32_t word = j % 4 == 0 ? of.x : j % 4 == 1 ? of.y : j % 4 == 2 ? of.z : of.w;
        if (i + j == 0 || i + j > non_zeros) continue;
        put(base + word / 32 % 8, word % 32, row, word >> 16);
      }
    }
  }
  // Columns [begin, end) of its values where it is spilled.
  __device__ __forceinline__ void put_spilled(const uint4* source, int base, int begin, int end,
                                              int row) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = begin / 8; i * 8 < end; i += kAhead) {
      uint4 values[kAhead] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if ((i + j) * 8 < end) values[j] = source[i + j];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) put_eight(values[j], base, (i + j) * 8, row);
    }
  }
  // The values of eight neighbouring columns, as far as they are in the union.
  __device__ __forceinline__ void put_eight(const uint4& values, int base, int column,
                                            int row) const {
    if ((values.x | values.y | values.z | values.w) == 0) return;
    uint32_t mask, before;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(mask), "=r"(before)
                 : "r"(words + (base + column / 32) * 8)
                 : "memory");
    const int bit = column % 32;
    int position = static_cast<int>(before) - first + __popc(mask & ((1u << bit) - 1));
    const uint32_t fires = mask >> bit & 0xff;
    if (fires == 0xff && position % 8 == 0 && position >= 0 && position + 8 <= count) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                       piece(position / kBlock, row, position % kBlock / 8)),
                   "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                   : "memory");
      return;
    }
    const uint32_t parts[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t bits = parts[k / 2] >> (k % 2 * 16);
      const bool in = fires >> k & 1;
      if (in && static_cast<uint32_t>(position) < static_cast<uint32_t>(count)) {
        put_at(position, row, bits);
      }
      position += in;
    }
  }
};

}  // namespace twell::tile_union::up
