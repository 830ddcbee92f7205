// SPDX-License-Identifier: Apache-2.0
// The weight gradients of hybrid training (hybrid_sm90.cu).
#pragma once

#include "twell/ops/ffn_train/hybrid_neurons_sm90.cuh"

namespace twell::ffn_train {
namespace {

// grads[p] [neurons of a tile] += images[p][tile]
// right[p][tokens of the tile]. An item is a piece of one such sum, for 128 neurons by 256 columns.
// The pieces of a sum are added to the gradients in their order, so that results repeat: the CTA
// with a later piece waits until the piece before it is added. This ends however few CTAs run at a
// time. A CTA takes items only while it runs, and works on them in ascending order. So the lowest
// item that is not done is the next one of a running CTA, and waits for none. Where gradients are
// overwritten, the first piece of a sum is stored and the others are added.
struct WeightGrads {
  NeuronTiles neurons;
  const __nv_bfloat16* right[3];  // [M, D]
  float* grads[3];                // [F, D]
  int width;                      // D
  bool add;                       // false: = instead of +=, for neurons that fire
};

struct Problem {
  static constexpr bool kOrdered = true;

  NeuronTiles neurons;
  const __nv_bfloat16* right[3];
  float* grads[3];
  int32_t* taken;
  int width;
  bool add;

  // {tile, product * columns + column block, first block, blocks | (2 * piece + more) << 16}
  __device__ __forceinline__ int4 load(int index) const {
    if (index >= neurons.counts->items) return int4{-1, 0, 0, 0};
    const int sums = neurons.products * neurons.columns;
    const int4 entry = neurons.entries[index / sums];
    return int4{entry.z, index % sums, entry.x, entry.y | entry.w << 16};
  }
  __device__ __forceinline__ gathered::Operands operands(const int4& item) const {
    const int product = item.y / neurons.columns, column = item.y % neurons.columns;
    const auto* image = reinterpret_cast<const uint8_t*>(neurons.images[product]) +
                        int64_t{item.z} * gathered::kBytesA;
    const auto* from = reinterpret_cast<const uint4*>(right[product]);
    const int blocks = item.w & 0xffff;
    return {{image, image},
            {from, from},
            neurons.ids + int64_t{item.z} * tile_union::kBlock,
            blocks * tile_union::kBlock,
            blocks,
            1,
            column * kColumns};
  }

  struct Store {
    const Problem& problem;
    int neuron[2];  // rows of the gradient that this lane has values of
    float* grad;    // this lane's first column
    int columns;    // from there to the end of the row
    int32_t* turn;
    int piece;
    bool more;

    __device__ __forceinline__ Store(const Problem& problem_in, const int4& item)
        : problem(problem_in) {
      const int thread = threadIdx.x % 128, lane = thread % 32;
      const int warpgroup = threadIdx.x / 128 - 1;
      const NeuronTiles& neurons = problem.neurons;
      const int32_t* order =
          neurons.order + item.x * kNeuronTile + warpgroup * 64 + thread / 32 * 16 + lane / 4;
      neuron[0] = order[0];
      neuron[1] = order[8];
      const int column = item.y % neurons.columns * kColumns + lane % 4 * 2;
      grad = problem.grads[item.y / neurons.columns] + column;
      columns = problem.width - column;
      turn = neurons.turns + (int64_t{item.x} * neurons.products * neurons.columns + item.y) * 2 +
             warpgroup;
      piece = item.w >> 17;
      more = (item.w >> 16 & 1) != 0;
    }
    __device__ __forceinline__ void operator()(const float (&acc)[128], uint32_t) const {
      const int warpgroup = threadIdx.x / 128 - 1;
      if (piece > 0) {
        if (threadIdx.x % 128 == 0) {
          while (gpu::load_acquire(turn) != piece) {
          }
        }
        gpu::named_barrier(1 + warpgroup, 128);
      }
      if (piece == 0 && !problem.add) {
        for_each_pair(acc, [](float* to, float a, float b) {
          *reinterpret_cast<float2*>(to) = float2{a, b};
        });
      } else {
        // Reductions in the L2 cache return nothing, so no thread waits for memory. Only one thread
        // at a time adds to a value, so the order of additions is fixed.
        for_each_pair(acc, [](float* to, float a, float b) {
          asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
                       : "memory");
        });
      }
      if (more) {
        __threadfence();
        gpu::named_barrier(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) {
          asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(piece + 1)
                       : "memory");
        }
      }
    }
    template <typename Use>
    __device__ __forceinline__ void for_each_pair(const float (&acc)[128], const Use& use) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (neuron[half] < 0) continue;
        float* row = grad + int64_t{neuron[half]} * problem.width;
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
          if (i * 8 >= columns) continue;
          const int a = 4 * i + 2 * half;
          use(row + i * 8, acc[a], acc[a + 1]);
        }
      }
    }
  };
};

constexpr int kClearThreads = 256;

// One CTA per neuron.
__global__ void __launch_bounds__(kClearThreads) clear_idle_kernel(WeightGrads grads) {
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  if (grads.neurons.nnz[blockIdx.x] != 0) return;
  const int pieces = grads.width / 4;
  for (int p = 0; p < grads.neurons.products; ++p) {
    auto* row = reinterpret_cast<float4*>(grads.grads[p]) + int64_t{blockIdx.x} * pieces;
    for (int i = threadIdx.x; i < pieces; i += kClearThreads) row[i] = float4{};
  }
}

cudaError_t launch_clear_idle(const WeightGrads& grads, cudaStream_t stream) {
  return gpu::launch_dependent(clear_idle_kernel, dim3(static_cast<unsigned>(grads.neurons.ffn)),
                               kClearThreads, 0, stream, grads);
}

cudaError_t launch_weight_grads(const WeightGrads& grads, int ctas, cudaStream_t stream) {
  Problem problem{};
  problem.neurons = grads.neurons;
  for (int p = 0; p < 3; ++p) {
    problem.right[p] = grads.right[p];
    problem.grads[p] = grads.grads[p];
  }
  problem.taken = &grads.neurons.counts->taken;
  problem.width = grads.width;
  problem.add = grads.add;
  return gathered::launch(problem, ctas, stream);
}

}  // namespace
}  // namespace twell::ffn_train
