// SPDX-License-Identifier: Apache-2.0
// Four CTAs share out the terms of a product of 64 tokens, and then its tokens: each adds up the
// partial sums of 16 of them, in the CTAs' order. A warp's accumulators hold just the 16 tokens
// that one of the CTAs adds up, so they go there as they are, through distributed shared memory:
// [from CTA][block of 8 columns][lane] float4.
#pragma once

#include "twell/sm90/barrier.cuh"
#include "twell/sm90/cluster.cuh"

namespace twell::few_token {

constexpr int kSplit = 4;         // CTAs of a cluster
constexpr int kBlockBytes = 512;  // what a warp sends of 8 columns
template <int Columns>
constexpr int kSentBytes = kSplit*(Columns / 8) * kBlockBytes;  // that a CTA gets

// CTAs tell each other when sums may come, on barriers of kSplit arrivals at the same place in all
// of them. By the first warp, once its warpgroup is done with what lies there. Not by the cluster's
// own barrier: while warps have work between arriving there and waiting, compute-sanitizer's tools
// do not get on.
__device__ __forceinline__ void tell_room(const uint64_t* barrier) {
  if (threadIdx.x < kSplit) {
    sm90::barrier_arrive_cluster(sm90::smem_address(barrier), threadIdx.x);
  }
}

// Sends blocks of 8 columns of a warp, if it `sends` any, to `place` in another CTA;
// place and barrier are remote addresses.
template <int Block, int End, int Registers>
__device__ __forceinline__ void send_blocks(const float (&acc)[Registers], uint32_t place,
                                            uint32_t barrier, bool sends) {
  if constexpr (Block < End) {
    sm90::store_remote16<Block * kBlockBytes>(place, acc[4 * Block], acc[4 * Block + 1],
                                              acc[4 * Block + 2], acc[4 * Block + 3], barrier,
                                              sends);
    send_blocks<Block + 1, End>(acc, place, barrier, sends);
  }
}
// Where a warp's lane has its part of what comes from CTA `rank`.
__device__ __forceinline__ uint32_t sums_place(uint32_t place, int rank, int blocks) {
  return place + static_cast<uint32_t>(rank * blocks) * kBlockBytes + threadIdx.x % 32 * 16;
}
// Sends a warp's Columns columns to CTA `to`, to `place` there.
template <int Columns, int Registers>
__device__ __forceinline__ void send_sums(const float (&acc)[Registers], uint32_t place,
                                          uint32_t barrier, int rank, int to, bool sends = true) {
  send_blocks<0, Columns / 8>(acc, sm90::remote_address(sums_place(place, rank, Columns / 8), to),
                              sm90::remote_address(barrier, to), sends);
}

__device__ __forceinline__ float4 load_sums(uint32_t place) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(place)
               : "memory");
  return v;
}
// Of a block of 8 columns; `stride` is kSentBytes / kSplit of what was sent. Lane 4g + t gets
// {x, y}: token g, columns 2t, 2t + 1; {z, w}: token g + 8.
__device__ __forceinline__ float4 add_sums(uint32_t place, int block, uint32_t stride) {
  float4 sum{};
#pragma unroll
  for (int from = 0; from < kSplit; ++from) {
    const float4 v = load_sums(place + from * stride + block * kBlockBytes + threadIdx.x % 32 * 16);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  return sum;
}

}  // namespace twell::few_token
