// SPDX-License-Identifier: Apache-2.0
// The gate GEMM with TwELL output on mma.sync, for GPUs of compute capability 8.0 and later, on
// ring_gemm_sm80.cuh. Hopper has its own (gate_gemm_sm90.cu).
//
// An item is 128 tokens by 256 neurons, the TwELL tile. The epilogue packs out of registers: lanes
// count the non-zeros of their columns, warps exchange their counts of a row through shared memory,
// and each lane writes its own behind those of the lanes and warps before it. The ring goes on
// loading meanwhile.
#include <algorithm>

#include "twell/base/error.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/ring_gemm_sm80.cuh"

namespace twell {
namespace {

// Row tiles that share a sweep over F, for L2 reuse.
constexpr int kGroup = 8;

struct GateItems {
  static constexpr bool kColumns = false;
  static constexpr int kLeastGroups = 4;

  const __nv_bfloat16* x;  // [M, D]
  const __nv_bfloat16* w;  // [F, D]
  uint32_t* words;         // [M, tiles, slots]
  uint32_t* spill;         // [M * tiles, 128] two bf16 each
  int32_t* row_nnz;        // [M], starts at 0
  int tokens, width, ffn;
  int m_tiles, n_tiles;  // n_tiles: also TwELL's per row
  int slots;             // words per (row, tile)
  uint32_t cut;          // of FATReLU
  const int32_t* condition;

  __device__ __forceinline__ int take(int number) const { return blockIdx.x + number * gridDim.x; }
  __device__ __forceinline__ int items() const { return m_tiles * n_tiles; }
  // {first token, TwELL tile}
  __device__ __forceinline__ int4 first(int index) const {
    const int per_group = kGroup * n_tiles;
    const int first_m = index / per_group * kGroup, within = index % per_group;
    const int group = min(kGroup, m_tiles - first_m);
    return int4{(first_m + within % group) * ring_gemm::kTileM, within / group, 0, 0};
  }
  __device__ __forceinline__ int4 second(const int4& item) const { return item; }
  __device__ __forceinline__ int groups(const int4&) const { return 4; }
  __device__ __forceinline__ int steps(const int4&) const {
    return (width + ring_gemm::kStepK - 1) / ring_gemm::kStepK;
  }

  struct Copies {
    const uint4 *x, *w;   // this thread's piece of its first row of each
    int tokens, neurons;  // from that row to the last one

    __device__ __forceinline__ void begin(const GateItems& problem, const int4& item) {
      using namespace ring_gemm;
      const int64_t pieces = problem.width / 8;
      const int token = item.x + copied_row(), neuron = item.y * kTileN + copied_row();
      x = reinterpret_cast<const uint4*>(problem.x) + token * pieces + copied_piece();
      w = reinterpret_cast<const uint4*>(problem.w) + neuron * pieces + copied_piece();
      tokens = problem.tokens - token;
      neurons = problem.ffn - neuron;
    }
    __device__ __forceinline__ void copy(const GateItems& problem, uint32_t stage, int step) const {
      using namespace ring_gemm;
      const int piece = step * kPieces, pieces = problem.width / 8;
      const bool inside = piece + copied_piece() < pieces;
#pragma unroll
      for (int i = 0; i < kTileM / kCopiedRows; ++i) {
        const bool valid = inside && i * kCopiedRows < tokens;
        gpu::gather16(stage + copied_place(i),
                      valid ? x + piece + int64_t{i * kCopiedRows} * pieces : x, valid);
      }
#pragma unroll
      for (int i = 0; i < kTileN / kCopiedRows; ++i) {
        const bool valid = inside && i * kCopiedRows < neurons;
        gpu::gather16(stage + kBytesA + copied_place(i),
                      valid ? w + piece + int64_t{i * kCopiedRows} * pieces : w, valid);
      }
    }
  };

  // The pair of columns j of a row, after ReLU; 0 past the last neuron, where rows of w are read as
  // zeros, whose products with Inf or NaN are NaN.
  template <int kGroups>
  __device__ __forceinline__ uint32_t pair(const float (&acc)[2 * kGroups][4], int j, int half,
                                           int column) const {
    const uint32_t values =
        gpu::above(gpu::relu_bf16x2(acc[j][2 * half], acc[j][2 * half + 1]), cut);
    return column < ffn ? values : 0;
  }

  template <int kGroups>
  __device__ __forceinline__ void finish(const int4& item, const float (&acc)[4][2 * kGroups][4],
                                         int32_t* shared) const {
    using namespace ring_gemm;
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int first_column = item.y * kTileN + column_of<kGroups>(0);
    int before[4][2];  // non-zeros of the row in lanes of the quad before this one
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int count = 0;
#pragma unroll
        for (int j = 0; j < 2 * kGroups; ++j) {
          const uint32_t values = pair<kGroups>(acc[i], j, half, first_column + j * 8);
          count += ((values & 0xffffu) != 0) + (values >> 16 != 0);
        }
        int through = count;
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const int other = __shfl_up_sync(~0u, through, step, 4);
          if (quad >= step) through += other;
        }
        before[i][half] = through - count;
        if (quad == 3) shared[row_of(i, half) * 4 + warp_n()] = through;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = item.x + row_of(i, half);
        const int4 of_warps = *reinterpret_cast<const int4*>(shared + row_of(i, half) * 4);
        const int total = of_warps.x + of_warps.y + of_warps.z + of_warps.w;
        const bool exists = row < tokens, spilled = total >= slots;
        const int64_t slot = int64_t{row} * n_tiles + item.y;
        uint32_t* out = words + slot * slots;
        if (warp_n() == 0 && quad == 0 && exists) {
          out[0] = static_cast<uint32_t>(total);
          if (spilled) out[1] = static_cast<uint32_t>(slot);
          if (total > 0) atomicAdd(row_nnz + row, total);
        }
        if (!exists || total == 0) continue;
        uint32_t* next = out + 1 + before[i][half] + (warp_n() > 0 ? of_warps.x : 0) +
                         (warp_n() > 1 ? of_warps.y : 0) + (warp_n() > 2 ? of_warps.z : 0);
#pragma unroll
        for (int j = 0; j < 2 * kGroups; ++j) {
          const int column = first_column + j * 8;
          const uint32_t values = pair<kGroups>(acc[i], j, half, column);
          if (spilled) {
            spill[slot * (kTileN / 2) + column % kTileN / 2] = values;
          } else {
            if ((values & 0xffffu) != 0) *next++ = (values << 16) + (column & 0xffff);
            if (values >> 16 != 0) *next++ = (values & 0xffff0000u) + ((column + 1) & 0xffff);
          }
        }
      }
    }
  }
};

}  // namespace

void gate_gemm_ring_cuda(CudaContext& ctx, const GateGemmCuda& problem) {
  check_packed_ffn(ctx, problem.tokens, problem.width, problem.ffn, problem.out, /*portable=*/true);
  TWELL_CHECK(problem.out.spill_slots >= problem.out.shape.max_spill_slots(),
              "gate GEMM: {} spill slots, expected {}", problem.out.spill_slots,
              problem.out.shape.max_spill_slots());
  if (problem.tokens == 0) return;
  TWELL_CUDA_CHECK(cudaMemsetAsync(
      problem.out.row_nnz, 0, static_cast<size_t>(problem.tokens) * sizeof(int32_t), ctx.stream()));
  const auto tiles = [](int64_t size, int of) { return static_cast<int>((size + of - 1) / of); };
  const GateItems items{problem.x,
                        problem.w_gate,
                        problem.out.words,
                        reinterpret_cast<uint32_t*>(problem.out.spill),
                        problem.out.row_nnz,
                        static_cast<int>(problem.tokens),
                        static_cast<int>(problem.width),
                        static_cast<int>(problem.ffn),
                        tiles(problem.tokens, ring_gemm::kTileM),
                        static_cast<int>(problem.out.shape.tiles()),
                        problem.out.shape.slots(),
                        problem.cut,
                        problem.condition};
  const int ctas = std::min(items.m_tiles * items.n_tiles, ctx.multiprocessors());
  TWELL_CUDA_CHECK(ring_gemm::launch(items, ctas, ctx.stream()));
}

}  // namespace twell
