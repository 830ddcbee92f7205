// SPDX-License-Identifier: Apache-2.0
// The weight gradients of hybrid training on Hopper.
#include "twell/gpu/sync.cuh"
#include "twell/ops/ffn/tile_union/gathered_gemm_sm90.cuh"
#include "twell/ops/ffn_train/weight_grads.cuh"

namespace twell::ffn_train {
namespace {

struct Problem : WeightGradItems {
  using WeightGradItems::WeightGradItems;
  static constexpr bool kOrdered = true;

  __device__ __forceinline__ int4 load(int index) const {
    return index >= items() ? int4{-1, 0, 0, 0} : first(index);
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
      const int column = item.y % neurons.columns * tile_union::kColumns + lane % 4 * 2;
      grad = problem.grads[item.y / neurons.columns] + column;
      columns = problem.width - column;
      turn = problem.WeightGradItems::turn(item, warpgroup);
      piece = WeightGradItems::piece(item);
      more = WeightGradItems::more(item);
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
        for (int i = 0; i < tile_union::kColumns / 8; ++i) {
          if (i * 8 >= columns) continue;
          const int a = 4 * i + 2 * half;
          use(row + i * 8, acc[a], acc[a + 1]);
        }
      }
    }
  };
};

}  // namespace

cudaError_t launch_weight_grads_sm90(const WeightGrads& grads, int ctas, cudaStream_t stream) {
  return tile_union::gathered::launch(Problem(grads), ctas, stream);
}

}  // namespace twell::ffn_train
