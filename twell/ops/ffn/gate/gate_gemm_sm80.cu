// SPDX-License-Identifier: Apache-2.0
// The gate GEMM with TwELL output on mma.sync, for GPUs of compute capability 8.0 and later. Hopper
// has its own (gate_gemm_sm90.cu).
//
// A CTA computes 128 tokens by 256 neurons, the TwELL tile: eight warps of 64 x 64, operands in a
// ring buffer of four stages that cp.async fills. A tile's activations are then written to the ring
// buffer's memory as bf16, and each warp packs a row at a time: each lane holds eight neighbouring
// columns, so that a prefix sum over the warp gives ascending order. Takes 96 KiB of shared memory,
// which every GPU of compute capability 8.0 to 9.0 has.
#include <algorithm>

#include "twell/base/error.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell {
namespace gate_gemm_sm80 {
namespace {

using gpu::warp_prefix;

constexpr int kTileM = 128;
constexpr int kTileN = 256;  // the TwELL tile

struct Params {
  const __nv_bfloat16* x;  // [M, D]
  const __nv_bfloat16* w;  // [F, D]
  uint32_t* words;         // [M, tiles, slots]
  uint4* spill;            // [M * tiles, 32] eight bf16 each
  int32_t* row_nnz;        // [M], starts at 0
  int tokens, width, ffn;
  int m_tiles, n_tiles;  // n_tiles: also TwELL's per row
  int slots;             // words per (row, tile)
  uint32_t cut;          // of FATReLU
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStepK = 32;  // four 16-byte pieces per row
constexpr int kPieces = kStepK / 8;
constexpr int kStages = 4;
constexpr int kBytesA = kTileM * kStepK * 2;
constexpr int kStageBytes = (kTileM + kTileN) * kStepK * 2;
constexpr int kPackPitch = kTileN * 2 + 16;  // padding spreads rows over the banks
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kTileM * kPackPitch <= kSharedBytes);
// Row tiles that share a sweep over F, for L2 reuse.
constexpr int kGroup = 8;

// Swizzled place of one of a row's four pieces: the eight rows of an ldmatrix hit different banks.
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return (row * kPieces + (piece ^ (row / 2 % 4))) * 16;
}

__device__ __forceinline__ void copy16(uint32_t dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Loads a thread's share of `Rows` rows of a matrix, k-step by k-step.
template <int Rows>
class RowLoader {
 public:
  __device__ __forceinline__ RowLoader(const __nv_bfloat16* matrix, int row, int rows, int width)
      : from_(matrix + int64_t{row + first()} * width + piece() * 8),
        pitch_(int64_t{width} * kPerPass),
        left_(rows - row - first()),
        columns_(width - piece() * 8) {}

  // Loads the next k-step into a stage, zeros outside the matrix.
  __device__ __forceinline__ void load(uint32_t dst) {
#pragma unroll
    for (int i = 0; i < Rows / kPerPass; ++i) {
      copy16(dst + swizzled(i * kPerPass + first(), piece()), from_ + i * pitch_,
             i * kPerPass < left_ && columns_ > 0);
    }
    from_ += kStepK;
    columns_ -= kStepK;
  }

 private:
  static constexpr int kPerPass = kThreads / kPieces;
  __device__ static int first() { return threadIdx.x / kPieces; }
  __device__ static int piece() { return threadIdx.x % kPieces; }

  const __nv_bfloat16* from_;
  int64_t pitch_;
  int left_, columns_;
};

// Operands of one k-step of 16 for this warp's 64 tokens by 64 neurons.
struct Fragments {
  uint32_t a[4][4], b[4][4];

  __device__ __forceinline__ void load(uint32_t stage, int k_piece, int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices(a[i], stage + swizzled(warp_m * 64 + i * 16 + lane % 16, k_piece + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = warp_n * 64 + j * 16 + lane / 16 * 8 + lane % 8;
      load_matrices(b[j], stage + kBytesA + swizzled(row, k_piece + lane / 8 % 2));
    }
  }
  __device__ __forceinline__ void multiply(float (&acc)[4][8][4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma(acc[i][2 * j], a[i], b[j][0], b[j][1]);
        mma(acc[i][2 * j + 1], a[i], b[j][2], b[j][3]);
      }
    }
  }
};

// A whole warp packs one row of a tile, eight values per lane.
__device__ __forceinline__ void pack_row(const Params& params, const uint4& eight, int row,
                                         int tile) {
  const int lane = threadIdx.x % 32;
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
  int count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) count += ((pairs[i] & 0xffffu) != 0) + (pairs[i] >> 16 != 0);
  int total;
  const int before = warp_prefix(count, total);
  const int64_t slot = int64_t{row} * params.n_tiles + tile;
  uint32_t* words = params.words + slot * params.slots;
  if (lane == 0) {
    words[0] = total;
    if (total >= params.slots) words[1] = static_cast<uint32_t>(slot);
    if (total > 0) atomicAdd(params.row_nnz + row, total);
  }
  if (total >= params.slots) {
    params.spill[slot * 32 + lane] = eight;
    return;
  }
  uint32_t* next = words + 1 + before;
  const uint32_t column = (tile * kTileN + lane * 8) & 0xffff;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((pairs[i] & 0xffffu) != 0) *next++ = (pairs[i] << 16) + column + 2 * i;
    if (pairs[i] >> 16 != 0) *next++ = (pairs[i] & 0xffff0000u) + column + 2 * i + 1;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    gate_gemm_sm80_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % 2, warp_n = warp / 2;
  const int per_group = kGroup * params.n_tiles;
  const int first_m = blockIdx.x / per_group * kGroup, within = blockIdx.x % per_group;
  const int group = min(kGroup, params.m_tiles - first_m);
  const int row = (first_m + within % group) * kTileM, tile = within / group;

  const int steps = (params.width + kStepK - 1) / kStepK;
  RowLoader<kTileM> tokens(params.x, row, params.tokens, params.width);
  RowLoader<kTileN> neurons(params.w, tile * kTileN, params.ffn, params.width);
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t stage = ring + step % kStages * kStageBytes;
      tokens.load(stage);
      neurons.load(stage + kBytesA);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float acc[4][8][4] = {};
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(i);
  const auto next_stage = [&] {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
  };
  // Fragments are loaded one k-step ahead of their products, across stages too.
  Fragments fragments[2];
  next_stage();
  fragments[0].load(ring, 0, warp_m, warp_n);
  for (int step = 0; step < steps; ++step) {
    fragments[1].load(ring + step % kStages * kStageBytes, 2, warp_m, warp_n);
    load(step + kStages - 1);  // into the stage before this one
    fragments[0].multiply(acc);
    next_stage();
    if (step + 1 < steps) {
      fragments[0].load(ring + (step + 1) % kStages * kStageBytes, 0, warp_m, warp_n);
    }
    fragments[1].multiply(acc);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint8_t* to = shared + (warp_m * 64 + i * 16 + lane / 4) * kPackPitch +
                    (warp_n * 64 + j * 8 + lane % 4 * 2) * 2;
      *reinterpret_cast<uint32_t*>(to) =
          gpu::above(gpu::relu_bf16x2(acc[i][j][0], acc[i][j][1]), params.cut);
      *reinterpret_cast<uint32_t*>(to + 8 * kPackPitch) =
          gpu::above(gpu::relu_bf16x2(acc[i][j][2], acc[i][j][3]), params.cut);
    }
  }
  __syncthreads();
#pragma unroll 4
  for (int r = warp; r < kTileM; r += kWarps) {
    if (row + r >= params.tokens) break;
    // Rows of w past the last neuron are read as zeros, whose products with Inf or NaN are NaN.
    const bool exists = tile * kTileN + lane * 8 < params.ffn;
    const auto* values = reinterpret_cast<const uint4*>(shared + r * kPackPitch + lane * 16);
    pack_row(params, exists ? *values : uint4{}, row + r, tile);
  }
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(
      gate_gemm_sm80_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  gate_gemm_sm80_kernel<<<params.m_tiles * params.n_tiles, kThreads, kSharedBytes, stream>>>(
      params);
  return cudaGetLastError();
}

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
  const Params params{problem.x,
                      problem.w_gate,
                      problem.out.words,
                      reinterpret_cast<uint4*>(problem.out.spill),
                      problem.out.row_nnz,
                      static_cast<int>(problem.tokens),
                      static_cast<int>(problem.width),
                      static_cast<int>(problem.ffn),
                      static_cast<int>((problem.tokens + kTileM - 1) / kTileM),
                      static_cast<int>(problem.out.shape.tiles()),
                      problem.out.shape.slots(),
                      problem.cut};
  TWELL_CUDA_CHECK(launch(params, ctx.stream()));
}

}  // namespace twell
