// SPDX-License-Identifier: Apache-2.0
// The weight gradients of hybrid training on every GPU of compute capability 8.0 and later.
#include "twell/gpu/sync.cuh"
#include "twell/ops/ffn/tile_union/gathered_gemm_sm80.cuh"
#include "twell/ops/ffn_train/weight_grads.cuh"

namespace twell::ffn_train {
namespace {

// Adds two values, which no other thread adds to at the time, so that the order is fixed.
// Reductions in the L2 cache return nothing, so no thread waits for memory.
__device__ __forceinline__ void add_pair(float* to, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(a) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(b) : "memory");
#endif
}

struct Items : WeightGradItems {
  using WeightGradItems::WeightGradItems;
  static constexpr const int32_t* condition = nullptr;

  __device__ __forceinline__ int take(int) const { return atomicAdd(taken, 1); }

  __device__ __forceinline__ void store(const int4& item, const float (&acc)[4][8][4]) const {
    using namespace ring_gemm;
    const int half_tile = warp_m();  // 128 threads
    int32_t* turn_word = turn(item, half_tile);
    if (piece(item) > 0) {
      if (threadIdx.x % 128 == 0) {
        while (gpu::load_acquire(turn_word) != piece(item)) {
        }
      }
      gpu::named_barrier(1 + half_tile, 128);
    }
    const bool overwrites = piece(item) == 0 && !add;
    const int32_t* order = neurons.order + item.x * kNeuronTile;
    const int column = item.y % neurons.columns * tile_union::kColumns + column_of<4>(0);
    float* grad = grads[item.y / neurons.columns] + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int neuron = order[row_of(i, half)];
        if (neuron < 0) continue;
        float* row = grad + int64_t{neuron} * width;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j * 8 >= width) continue;
          const float a = acc[i][j][2 * half], b = acc[i][j][2 * half + 1];
          if (overwrites) {
            *reinterpret_cast<float2*>(row + j * 8) = float2{a, b};
          } else {
            add_pair(row + j * 8, a, b);
          }
        }
      }
    }
    if (more(item)) {
      __threadfence();
      gpu::named_barrier(1 + half_tile, 128);
      if (threadIdx.x % 128 == 0) gpu::store_release(turn_word, piece(item) + 1);
    }
  }
};

}  // namespace

cudaError_t launch_weight_grads_sm80(const WeightGrads& grads, int ctas, cudaStream_t stream) {
  return tile_union::gathered::launch_sm80(Items(grads), ctas, stream);
}

}  // namespace twell::ffn_train
