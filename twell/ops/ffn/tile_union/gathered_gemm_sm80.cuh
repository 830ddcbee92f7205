// SPDX-License-Identifier: Apache-2.0
// The gathered GEMM (gathered_items.cuh) for compute capability 8.0 and later, on
// ring_gemm_sm80.cuh. Items has items, take, first, second, operands and condition, and store(item,
// acc), the epilogue, with the accumulators of a warp's 64 rows by 64 columns.
#pragma once

#include "twell/ops/ffn/ring_gemm_sm80.cuh"
#include "twell/ops/ffn/tile_union/gathered_items.cuh"

namespace twell::tile_union::gathered {

template <typename Items>
struct RingProblem : Items {
  static constexpr bool kColumns = true;
  static constexpr int kLeastGroups = 4;
  static_assert(ring_gemm::kTileM == kTileTokens && ring_gemm::kTileN == tile_union::kColumns);

  __device__ __forceinline__ int groups(const int4&) const { return 4; }
  // Two k-steps for each block. An item without any has one, of zeros.
  __device__ __forceinline__ int steps(const int4& item) const {
    return max(2 * this->operands(item).k_steps(), 1);
  }

  struct Copies {
    const uint4 *a[2], *b[2];  // this lane's column of B
    const int32_t* ids;
    int positions, steps_of_pass;
    bool inside;
    int4 next;  // the ids of the next k-step's rows that this warp copies

    __device__ __forceinline__ void load_ids(int step) {
      constexpr int kRows = ring_gemm::kStepK / (ring_gemm::kThreads / 32);
      static_assert(kRows == 4);
      const int position = step * ring_gemm::kStepK + threadIdx.x / 32 * kRows;
      next = position < positions ? __ldg(reinterpret_cast<const int4*>(ids + position))
                                  : int4{-1, -1, -1, -1};
    }
    __device__ __forceinline__ void begin(const RingProblem& problem, const int4& item) {
      const Operands operands = problem.operands(item);
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = reinterpret_cast<const uint4*>(operands.a[i]);
        b[i] = operands.b[i] + operands.column / 8 + lane;
      }
      ids = operands.ids;
      positions = operands.positions;
      steps_of_pass = 2 * operands.blocks;
      inside = operands.column + lane * 8 < problem.width;
      load_ids(0);
    }
    __device__ __forceinline__ void copy(const RingProblem& problem, uint32_t stage, int step) {
      using ring_gemm::copied_piece, ring_gemm::copied_place, ring_gemm::copied_row;
      using ring_gemm::kCopiedRows, ring_gemm::kPieces, ring_gemm::kStepK, ring_gemm::kTileM;
      using ring_gemm::n_major_place;
      const bool second = step >= steps_of_pass && positions > 0;
      const int of_pass = second ? step - steps_of_pass : step;
      // Half of a block: four of the eight pieces of each row, which the image permutes.
      const uint4* image = (second ? a[1] : a[0]) + int64_t{of_pass / 2} * (gathered::kBytesA / 16);
#pragma unroll
      for (int i = 0; i < kTileM / kCopiedRows; ++i) {
        const int row = copied_row() + i * kCopiedRows;
        const int piece = (of_pass % 2 * kPieces + copied_piece()) ^ (row % 8);
        gpu::gather16(stage + copied_place(i), image + row * (kBlock / 8) + piece, positions > 0);
      }
      const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 4;
      const uint4* from = second ? b[1] : b[0];
      const int pieces = problem.width / 8;
      const int4 rows = next;
      const int left = positions - of_pass * kStepK - first;
      const auto copy_row = [&](int r, int id) {
        const bool valid = inside && r < left && id >= 0;
        gpu::gather16(stage + ring_gemm::kBytesA + n_major_place(first + r, lane),
                      from + (valid ? int64_t{id} * pieces : 0), valid);
      };
      copy_row(0, rows.x);
      copy_row(1, rows.y);
      copy_row(2, rows.z);
      copy_row(3, rows.w);
      load_ids(of_pass + 1 == steps_of_pass ? 0 : of_pass + 1);
    }
  };

  template <int kGroups>
  __device__ __forceinline__ void finish(const int4& item, const float (&acc)[4][2 * kGroups][4],
                                         int32_t*) const {
    this->store(item, acc);
  }
};

template <typename Items>
cudaError_t launch_sm80(const Items& items, int ctas, cudaStream_t stream) {
  return ring_gemm::launch(RingProblem<Items>{items}, ctas, stream);
}

}  // namespace twell::tile_union::gathered
