// SPDX-License-Identifier: Apache-2.0
// How a warp of the gate kernel multiplies 16 neurons by its part of the width: weights through a
// ring of its own.
//
// k may run in any order that both operands agree on: a lane takes 8 consecutive values of k from
// its weight rows and from x in 16-byte loads and feeds them to two instructions, as k = 2t, 2t +
// 1, 2t + 8, 2t + 9 of each.
#pragma once

#include "twell/ops/few_token_ffn/few_token_kernels.h"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::few_token {

using namespace sm90;

constexpr int kParts = 8;                         // of the width
constexpr int kStepK = 64;                        // values of k per stage: a cache line per row
constexpr int kStageBytes = kGroup * kStepK * 2;  // of one warp's ring
constexpr int kMaxNeurons = 192;                  // per cluster

template <int Tiles_, int Cluster_, int Stages_, int MaxGroups_, int Residents_, bool StagedX_>
struct Config {
  static constexpr int kTiles = Tiles_;          // of 8 tokens
  static constexpr int kCluster = Cluster_;      // CTAs
  static constexpr int kStages = Stages_;        // of a warp's ring
  static constexpr int kMaxGroups = MaxGroups_;  // of neurons per cluster
  static constexpr int kResidents = Residents_;  // CTAs per multiprocessor
  static constexpr bool kStagedX = StagedX_;     // x in shared memory, or read where it is
  static constexpr int kWarpsPerGroup = kParts / kCluster;
  static constexpr int kMaxThreads = MaxGroups_ * kWarpsPerGroup * 32;
  static constexpr int kQuads = kTiles * 2;                      // of tokens
  static constexpr int kPartialBytes = kGroup * kTiles * 8 * 4;  // one warp's partial sums
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static_assert(kPartialBytes <= kWarpBytes, "partial sums use the ring");
  static_assert(kMaxGroups * kGroup <= kMaxNeurons);
  static_assert(kTiles % kCluster == 0, "a CTA's share of a group's outputs fills whole warps");
};

struct Params {
  GateUp problem;
  int part;    // values of k per warp, a multiple of kStepK
  int groups;  // per cluster
};

// max(0, value) as bf16 bits. NaN stays NaN.
__device__ __forceinline__ uint32_t relu_bf16(float value) {
  uint32_t bits;
  asm("cvt.rn.relu.bf16x2.f32 %0, 0f00000000, %1;" : "=r"(bits) : "f"(value));
  return bits & 0xffffu;
}

// Offset of a quad of tokens in a warp's [kGroup, quads] partial sums: swizzled, so that the eight
// neurons that a store instruction covers fall into different banks.
template <typename C>
__device__ __forceinline__ int partial_offset(int neuron, int quad) {
  constexpr int kRowsPerLine = 8 / (C::kQuads < 8 ? C::kQuads : 8);
  return (neuron * C::kQuads + (quad ^ (neuron % 8 / kRowsPerLine))) * 16;
}

// A warp's share of one product: its group's rows (those in `rows`), its part of k.
template <typename C>
class WarpRing {
 public:
  __device__ WarpRing(const GateUp& problem, uint32_t ring, uint32_t x_slice, int slice_k,
                      int slice_begin, int k_begin, int steps)
      : problem_(problem),
        ring_(ring),
        x_slice_(x_slice),
        slice_k_(slice_k),
        slice_begin_(slice_begin),
        k_begin_(k_begin),
        steps_(steps) {}

  // Fills the ring. weight: row 0 of the group; bit i of rows: row i is wanted.
  __device__ void start(const __nv_bfloat16* weight, uint32_t rows) {
    weight_ = weight;
    rows_ = rows;
#pragma unroll
    for (int step = 0; step < C::kStages; ++step) gather(step, step);
  }

  __device__ void finish(float (&acc)[C::kTiles][4]) {
    uint4 x[2][C::kTiles];
    if constexpr (!C::kStagedX) load_x(0, x);
    int stage = 0;
    for (int step = 0; step < steps_; ++step) {
      gathers_wait<C::kStages - 1>();
      __syncwarp();
      uint4 a[2][2];
      const int lane = threadIdx.x % 32, row = lane / 4;
      const uint32_t base = ring_ + stage * kStageBytes + row * (kStepK * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t piece = ((half * 4 + lane % 4) ^ (row % 2 * 4)) * 16;
        a[half][0] = load_shared16(base + piece);
        a[half][1] = load_shared16(base + 8 * (kStepK * 2) + piece);
      }
      if constexpr (C::kStagedX) load_x(step, x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
          const uint4 b = x[half][tile];
          mma_16x8x16(acc[tile], a[half][0].x, a[half][1].x, a[half][0].y, a[half][1].y, b.x, b.y);
          mma_16x8x16(acc[tile], a[half][0].z, a[half][1].z, a[half][0].w, a[half][1].w, b.z, b.w);
        }
      }
      if constexpr (!C::kStagedX) load_x(step + 1, x);
      __syncwarp();
      gather(step + C::kStages, stage);
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    gathers_wait<0>();
    __syncwarp();
  }

 private:
  __device__ void gather(int step, int stage) {
    if (step < steps_) {
      const int lane = threadIdx.x % 32, piece = lane % 8;
      const int k = k_begin_ + step * kStepK + piece * 8;
      const uint32_t dst = ring_ + stage * kStageBytes;
      const bool inside = k < problem_.width;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8;
        if ((rows_ >> row & 1) == 0) continue;  // what stays there only reaches row's own sums
        sm90::gather16(dst + row * (kStepK * 2) + (piece ^ (row % 2 * 4)) * 16,
                       inside ? weight_ + int64_t{row} * problem_.width + k : weight_, inside);
      }
    }
    gathers_commit();
  }

  __device__ void load_x(int step, uint4 (&x)[2][C::kTiles]) const {
    const int lane = threadIdx.x % 32, row = lane / 4;
    const int k = k_begin_ + step * kStepK + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < C::kTiles; ++tile) {
        if constexpr (C::kStagedX) {
          const int piece = (k - slice_begin_) / 8 + half * 4;
          x[half][tile] = load_shared16(x_slice_ + (tile * 8 + row) * slice_k_ * 2 +
                                        (piece ^ (row % 2 * 4)) * 16);
        } else {
          const int token = tile * 8 + row;
          x[half][tile] = uint4{};
          if (token < problem_.tokens && k + half * 32 < problem_.width && step < steps_) {
            x[half][tile] = *reinterpret_cast<const uint4*>(
                problem_.x + int64_t{token} * problem_.width + k + half * 32);
          }
        }
      }
    }
  }

  const GateUp& problem_;
  const __nv_bfloat16* weight_ = nullptr;
  uint32_t rows_ = 0;
  uint32_t ring_, x_slice_;
  int slice_k_, slice_begin_, k_begin_, steps_;
};

}  // namespace twell::few_token
