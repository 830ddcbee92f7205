// SPDX-License-Identifier: Apache-2.0
// Four CTAs share out the terms of a product of 64 tokens per warpgroup, and then its tokens: each
// adds up the partial sums of 16 tokens of a tile, in the CTAs' order. A warp's accumulators hold
// just the 16 tokens that one of the CTAs adds up, so they go there as they are, through
// distributed shared memory: [from CTA][block of 8 columns][lane] float4.
#pragma once

#include "twell/sm90/barrier.cuh"
#include "twell/sm90/cluster.cuh"

namespace twell::few_token {

constexpr int kSplit = 4;         // CTAs of a cluster
constexpr int kTile = 64;         // tokens
constexpr int kBlockBytes = 512;  // what a warp sends of 8 columns
template <int Columns>
constexpr int kSentBytes = kSplit*(Columns / 8) * kBlockBytes;  // that a CTA gets of a tile

// Sends a warp's Columns columns to CTA `to`, to `place` of the tile there.
template <int Columns, int Block = 0, int Registers>
__device__ __forceinline__ void send_block(const float (&acc)[Registers], uint32_t place,
                                           uint32_t barrier) {
  if constexpr (Block < Columns / 8) {
    sm90::store_remote16<Block * kBlockBytes>(place, acc[4 * Block], acc[4 * Block + 1],
                                              acc[4 * Block + 2], acc[4 * Block + 3], barrier);
    send_block<Columns, Block + 1>(acc, place, barrier);
  }
}
template <int Columns, int Registers>
__device__ __forceinline__ void send_sums(const float (&acc)[Registers], uint32_t place,
                                          uint32_t barrier, int rank, int to) {
  const uint32_t from =
      place + static_cast<uint32_t>(rank) * (Columns / 8 * kBlockBytes) + threadIdx.x % 32 * 16;
  send_block<Columns>(acc, sm90::remote_address(from, to), sm90::remote_address(barrier, to));
}

// Of a block of 8 columns; `stride` is kSentBytes / kSplit of what was sent. Lane 4g + t gets
// {x, y}: token g, columns 2t, 2t + 1; {z, w}: token g + 8.
__device__ __forceinline__ float4 add_sums(uint32_t place, int block, uint32_t stride) {
  float4 sum{};
#pragma unroll
  for (int from = 0; from < kSplit; ++from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(place + from * stride + block * kBlockBytes + threadIdx.x % 32 * 16)
                 : "memory");
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  return sum;
}

}  // namespace twell::few_token
