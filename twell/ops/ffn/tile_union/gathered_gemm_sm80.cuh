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
  // One or two sums, of two k-steps for each block. An item without any has one, of zeros.
  __device__ __forceinline__ int parts(const int4& item) const {
    return this->operands(item).passes;
  }
  __device__ __forceinline__ int steps(const int4& item) const {
    return max(2 * this->operands(item).blocks, 1);
  }

  struct Copies {
    static constexpr int kRows = ring_gemm::kStepK / (ring_gemm::kThreads / 32);  // of a warp
    static_assert(kRows == 4 && ring_gemm::kStepK * 2 == kBlock);
    const uint4 *a, *b;  // this thread's first row of the block of A, this lane's column of B
    const int32_t* ids;  // of the next k-step but one, that this warp copies
    int positions;       // ids from those of the next k-step to the end
    int odd;             // 4 in every second k-step, the second half of a block
    bool any, inside;
    int4 rows;  // ids of the next k-step

    __device__ __forceinline__ void load_ids() {
      rows = int4{-1, -1, -1, -1};
      if (positions > 0) rows = __ldg(reinterpret_cast<const int4*>(ids));
      ids += ring_gemm::kStepK;
    }
    __device__ __forceinline__ void begin(const RingProblem& problem, const int4& item, int part) {
      // After the last item nothing is read, but copies still form addresses: they are item 0's.
      const bool exists = item.x >= 0;
      const Operands operands = problem.operands(exists ? item : int4{});
      const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRows;
      const auto* images = reinterpret_cast<const uint4*>(part > 0 ? operands.a[1] : operands.a[0]);
      a = images + ring_gemm::copied_row() * (kBlock / 8);
      inside = operands.column + lane * 8 < problem.width;
      b = (part > 0 ? operands.b[1] : operands.b[0]) + (inside ? operands.column / 8 + lane : 0);
      ids = operands.ids + first;
      positions = exists ? operands.positions - first : 0;
      odd = 0;
      any = exists && operands.positions > 0;
      load_ids();
    }
    __device__ __forceinline__ void copy(const RingProblem& problem, uint32_t stage) {
      using namespace ring_gemm;
      const int4 now = rows;
      const int left = positions;
      positions -= kStepK;
      load_ids();  // early, because they come from memory
      // Half of a block: four of the eight pieces of each row, which the image permutes.
      const uint4* image = a + (odd ^ copied_piece() ^ (copied_row() % 8));
#pragma unroll
      for (int i = 0; i < kTileM / kCopiedRows; ++i) {
        gpu::gather16(stage + copied_place(i), image + i * (kCopiedRows * kBlock / 8), any);
      }
      const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRows;
      const auto copy_row = [&](int r, int id) {
        const bool valid = inside && r < left && id >= 0;
        const auto row = static_cast<uint32_t>(valid ? id : 0);
        const auto offset = uint64_t{row} * (static_cast<uint32_t>(problem.width) * 2);
        gpu::gather16(stage + ring_gemm::kBytesA + n_major_place(first + r, lane),
                      reinterpret_cast<const uint8_t*>(b) + offset, valid);
      };
      copy_row(0, now.x);
      copy_row(1, now.y);
      copy_row(2, now.z);
      copy_row(3, now.w);
      a += odd * (static_cast<int>(gathered::kBytesA) / 16 / kPieces);
      odd ^= kPieces;
    }
  };

  template <int kGroups>
  __device__ __forceinline__ void finish(const int4& item, const float (&acc)[4][2 * kGroups][4],
                                         uint8_t*) const {
    this->store(item, acc);
  }
};

template <typename Items>
cudaError_t launch_sm80(const Items& items, int ctas, cudaStream_t stream) {
  return ring_gemm::launch(RingProblem<Items>{items}, ctas, stream);
}

}  // namespace twell::tile_union::gathered
