// SPDX-License-Identifier: Apache-2.0
// What the kernels of small batches (small_batch_sm90.cu) share: their problems and launches, and
// the sums that the CTAs of a cluster exchange. W: the type of the weights, bf16 or e4m3 bytes.
#pragma once

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/few_tokens/few_token_sm90.cuh"

namespace twell::few_token {

using namespace gpu;

constexpr int kSplitTokens = 64;  // most tokens
constexpr int kMaxNeurons = 192;  // most neurons of a cluster at a time
constexpr int kWordNeurons = 32;  // neurons per word of Hidden::fired
static_assert(kMaxFewTokens == kSplitTokens);

template <typename W>
struct GateUp {
  const W* up;             // [F, D], null without a gate
  const W* down;           // [F, D] rows of active neurons are prefetched into the L2
  Hidden hidden;           // kWordNeurons per word
  ActivityCuda* activity;  // counts, or null
  int tokens, width, ffn;
  bool early_weights;  // the first weight may be read before the predecessor has finished
  bool squared;        // f(g) = g^2
  bool up_relu;        // dReLU
  uint32_t cut;        // of FATReLU
  // Operands in e4m3 have scales: of the rows of x, of the first weight and of w_up.
  const float *x_scales, *first_scales, *up_scales;
};

// The first weight is w_gate, or w_up without a gate.
template <typename W>
struct SplitGateUp {
  CUtensorMap map_x;      // [M, D] in boxes of 64 rows
  CUtensorMap map_first;  // [F, D] in boxes of neurons / 2 rows
  GateUp<W> problem;
  int neurons;       // neurons of a cluster at a time: a multiple of 64, at most kMaxNeurons
  int slice_chunks;  // chunks of 128 bytes per CTA of a cluster: a quarter of the width
};

// The first kernel (small_gate_up_sm90.cu). prepare lets it take its shared memory, and counts the
// clusters that fit into the device at one time.
template <typename W>
cudaError_t prepare_gate_up(int* clusters);
template <typename W>
cudaError_t launch_gate_up(const SplitGateUp<W>& params, int clusters, cudaStream_t stream);

// The second (small_down_sm90.cu).
template <typename W>
cudaError_t prepare_split_down();
template <typename W>
cudaError_t launch_split_down(const DownOf<W>& problem, cudaStream_t stream);

namespace {

// Reduction over a cluster. Each of four CTAs computes a part of the terms of a product of 64
// tokens, and then adds up the partial sums of 16 tokens, in the order of the CTAs. A warp's
// accumulators hold exactly the 16 tokens that one CTA adds up, so they are sent there as they are,
// through distributed shared memory: [from CTA][block of 8 columns][lane] float4.

constexpr int kSplit = 4;         // CTAs of a cluster
constexpr int kBlockBytes = 512;  // bytes that a warp sends for 8 columns
template <int Columns>
constexpr int kSentBytes = kSplit*(Columns / 8) * kBlockBytes;  // bytes that a CTA receives

// Tells all CTAs of the cluster that they may write their sums here, on barriers of kSplit arrivals
// at the same address in each of them. The first warp calls it once its warpgroup no longer uses
// that memory. The cluster barrier is not used, because compute-sanitizer hangs if warps work
// between arriving at it and waiting.
__device__ __forceinline__ void tell_room(const uint64_t* barrier) {
  if (threadIdx.x < kSplit) {
    gpu::barrier_arrive_cluster(gpu::smem_address(barrier), threadIdx.x);
  }
}

// Sends blocks of 8 columns of a warp, if it `sends` any, to `place` in another CTA. place and
// barrier are remote addresses.
template <int Block, int End, int Registers>
__device__ __forceinline__ void send_blocks(const float (&acc)[Registers], uint32_t place,
                                            uint32_t barrier, bool sends) {
  if constexpr (Block < End) {
    gpu::store_remote16<Block * kBlockBytes>(place, acc[4 * Block], acc[4 * Block + 1],
                                             acc[4 * Block + 2], acc[4 * Block + 3], barrier,
                                             sends);
    send_blocks<Block + 1, End>(acc, place, barrier, sends);
  }
}
// Address of this lane's part of the sums from CTA `rank`.
__device__ __forceinline__ uint32_t sums_place(uint32_t place, int rank, int blocks) {
  return place + static_cast<uint32_t>(rank * blocks) * kBlockBytes + threadIdx.x % 32 * 16;
}
// Sends a warp's `Columns` columns to `place` in CTA `to`.
template <int Columns, int Registers>
__device__ __forceinline__ void send_sums(const float (&acc)[Registers], uint32_t place,
                                          uint32_t barrier, int rank, int to, bool sends = true) {
  send_blocks<0, Columns / 8>(acc, gpu::remote_address(sums_place(place, rank, Columns / 8), to),
                              gpu::remote_address(barrier, to), sends);
}

__device__ __forceinline__ float4 load_sums(uint32_t place) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(place)
               : "memory");
  return v;
}
// Sum over the CTAs for a block of 8 columns; `stride` is kSentBytes / kSplit. Lane 4g + t gets {x,
// y}: token g, columns 2t, 2t + 1; {z, w}: the same of token g + 8.
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

}  // namespace

}  // namespace twell::few_token
