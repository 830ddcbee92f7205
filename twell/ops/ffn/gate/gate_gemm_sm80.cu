// SPDX-License-Identifier: Apache-2.0
// The gate GEMM with TwELL output on mma.sync, for GPUs of compute capability 8.0 and later, on
// ring_gemm_sm80.cuh. Hopper has its own (gate_gemm_sm90.cu).
//
// An item is 128 tokens by 256 neurons, the TwELL tile. The epilogue writes 32 rows at a time as
// bf16 to the ring buffer's free stage, where eight lanes pack each of them. The first k-steps of
// the next item are loaded meanwhile.
#include <algorithm>

#include "twell/base/error.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"
#include "twell/ops/ffn/ring_gemm_sm80.cuh"

namespace twell {
namespace gate_gemm_sm80 {
namespace {

// Row tiles that share a sweep over F, for L2 reuse.
constexpr int kGroup = 8;

struct GateItems {
  static constexpr bool kColumns = false;
  static constexpr int kLeastGroups = 4;

  const __nv_bfloat16* x;  // [M, D]
  const __nv_bfloat16* w;  // [F, D]
  uint32_t* words;         // [M, tiles, slots]
  uint4* spill;            // [M * tiles, 32] eight bf16 each
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
  __device__ __forceinline__ int parts(const int4&) const { return 1; }
  __device__ __forceinline__ int steps(const int4&) const {
    return (width + ring_gemm::kStepK - 1) / ring_gemm::kStepK;
  }

  // Rows past the last token and the last neuron repeat it: what is computed for them is not
  // packed.
  struct Copies {
    static constexpr int kRowsX = ring_gemm::kTileM / ring_gemm::kCopiedRows;
    static constexpr int kRowsW = ring_gemm::kTileN / ring_gemm::kCopiedRows;
    const uint4 *x, *w;                     // the item's first row
    uint32_t x_row[kRowsX], w_row[kRowsW];  // first piece of each row, from there on
    int piece;                              // of the next k-step, of a row

    __device__ __forceinline__ void begin(const GateItems& problem, const int4& item, int) {
      using namespace ring_gemm;
      const auto row_pieces = static_cast<uint32_t>(problem.width) / 8;
      const int token = max(item.x, 0), neuron = item.y * kTileN;
      x = reinterpret_cast<const uint4*>(problem.x) + int64_t{token} * row_pieces;
      w = reinterpret_cast<const uint4*>(problem.w) + int64_t{neuron} * row_pieces;
      const auto row = [&](int i, int left) {
        return static_cast<uint32_t>(min(copied_row() + i * kCopiedRows, left - 1)) * row_pieces;
      };
#pragma unroll
      for (int i = 0; i < kRowsX; ++i) x_row[i] = row(i, problem.tokens - token);
#pragma unroll
      for (int i = 0; i < kRowsW; ++i) w_row[i] = row(i, problem.ffn - neuron);
      piece = item.x < 0 ? static_cast<int>(row_pieces) : copied_piece();
    }
    __device__ __forceinline__ void copy(const GateItems& problem, uint32_t stage) {
      using namespace ring_gemm;
      const bool inside = piece < problem.width / 8;
      const int of_row = inside ? piece : 0;
#pragma unroll
      for (int i = 0; i < kRowsX; ++i) {
        gpu::gather16(stage + copied_place(i), x + of_row + x_row[i], inside);
      }
#pragma unroll
      for (int i = 0; i < kRowsW; ++i) {
        gpu::gather16(stage + kBytesA + copied_place(i), w + of_row + w_row[i], inside);
      }
      piece += kPieces;
    }
  };

  static constexpr int kRows = 32;                           // that are packed at a time
  static constexpr int kPitch = ring_gemm::kTileN * 2 + 16;  // padding spreads rows over the banks
  static_assert(kRows * kPitch <= ring_gemm::kStageBytes);

  template <int kGroups>
  __device__ __forceinline__ void finish(const int4& item, const float (&acc)[4][2 * kGroups][4],
                                         uint8_t* shared) const {
    using namespace ring_gemm;
    static_assert(kGroups == 4);
    const int lane = threadIdx.x % 32;
    uint8_t* const to = shared + (warp_m() * 16 + lane / 4) * kPitch + column_of<4>(0) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          *reinterpret_cast<uint32_t*>(to + half * 8 * kPitch + j * 16) =
              gpu::relu_bf16x2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
        }
      }
      __syncthreads();
      pack_row(item, i * 16, shared);
      __syncthreads();
    }
  }

 private:
  // Eight lanes pack one of the rows in shared memory, which are 16 of each half of the item, from
  // `first` on. A lane has pieces `seg`, seg + 8, .. of eight columns, and packs the lower halves
  // of its words before the upper ones.
  __device__ __forceinline__ void pack_row(const int4& item, int first,
                                           const uint8_t* shared) const {
    constexpr int kLanes = 8, kOwn = ring_gemm::kTileN / 8 / kLanes;
    static_assert(ring_gemm::kThreads / kLanes == kRows && kOwn * 4 == 16);
    const int seg = threadIdx.x % kLanes, of_pass = threadIdx.x / kLanes;
    const int row = item.x + of_pass / 16 * 64 + first + of_pass % 16, tile = item.y;
    const uint8_t* const from = shared + of_pass * kPitch;
    uint4 own[kOwn];
    uint32_t active = 0;  // bit k: the lower half of word k; bit 16 + k: the upper one
    // Halves are 0 to 0x7fff; NaN is the largest. Those above the cut carry into their sign.
    const uint32_t carry = (0x7fffu - cut) * 0x10001u;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i] = *reinterpret_cast<const uint4*>(from + (seg + i * kLanes) * 16);
      // Repeated neurons past the last one.
      const bool exists = tile * ring_gemm::kTileN + (seg + i * kLanes) * 8 < ffn;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t signs = gpu::word(own[i], k) + carry & 0x80008000u;
        active = active >> 1 | (exists ? signs : 0);
      }
    }
    int through = __popc(active);
    const int count = through;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step, kLanes);
      if (seg >= step) through += other;
    }
    const int total = __shfl_sync(~0u, through, kLanes - 1, kLanes);
    if (row >= tokens) return;
    const int64_t slot = int64_t{row} * n_tiles + tile;
    uint32_t* const out = words + slot * slots;
    if (seg == 0) {
      out[0] = static_cast<uint32_t>(total);
      if (total >= slots) out[1] = static_cast<uint32_t>(slot);
      if (total > 0) atomicAdd(row_nnz + row, total);
    }
    if (total >= slots) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool exists = tile * ring_gemm::kTileN + (seg + i * kLanes) * 8 < ffn;
        uint4 v = exists ? own[i] : uint4{};
        v.x = gpu::above(v.x, cut);
        v.y = gpu::above(v.y, cut);
        v.z = gpu::above(v.z, cut);
        v.w = gpu::above(v.w, cut);
        spill[slot * 32 + seg + i * kLanes] = v;
      }
      return;
    }
    uint32_t* next = out + 1 + through - count;
    while (active != 0) {
      const int bit = __ffs(static_cast<int>(active)) - 1, of = bit % 16;
      active &= active - 1;
      const int column = (seg + of / 4 * kLanes) * 8 + of % 4 * 2 + bit / 16;
      const uint32_t value = *reinterpret_cast<const uint16_t*>(from + column * 2);
      *next++ = value << 16 | ((tile * ring_gemm::kTileN + column) & 0xffff);
    }
  }
};

}  // namespace
}  // namespace gate_gemm_sm80

void gate_gemm_sm80_cuda(CudaContext& ctx, const GateGemmCuda& problem) {
  using namespace gate_gemm_sm80;
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
                        reinterpret_cast<uint4*>(problem.out.spill),
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
