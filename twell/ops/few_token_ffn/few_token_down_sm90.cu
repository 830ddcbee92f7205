// SPDX-License-Identifier: Apache-2.0
// y = h w_down over the neurons that fired, for up to 8 tokens. A CTA makes 16 columns of y, so it
// reads 32 bytes of each such neuron's row: the gate kernel has asked for the whole rows, and they
// are in the L2. Its eight warps take 16 neurons at a time, each through a ring of its own without
// any barrier among them, and multiply on mma.sync with columns as the 16-row operand and tokens as
// the 8-column one. The eight partial results are added in a fixed order.
#include "twell/ops/few_token_ffn/few_token_kernels.h"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::few_token {

using namespace sm90;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 16;
constexpr int kTokens = 8;
constexpr int kGroup = 16;  // neurons that a warp multiplies at a time
constexpr int kStages = 4;
constexpr int kWeightStage = kGroup * kColumns * 2;
constexpr int kStage = kWeightStage + kGroup * kTokens * 2;

// Neurons are listed a segment at a time, so that F is not bounded by shared memory.
constexpr int kSegment = kThreads * 32;

// Partial results in f32, [warps, tokens, columns]; rows are padded against bank conflicts.
constexpr int kPartialPitch = kColumns * 4 + 16;
constexpr int kPartialBytes = kTokens * kPartialPitch;

struct Shared {
  union {
    uint8_t ring[kWarps][kStages][kStage];
    uint8_t partials[kWarps][kPartialBytes];
  };
  uint16_t list[kSegment];
  int warp_sums[kWarps];
};

// Lists the neurons of a segment that fired, ascending; returns how many. All threads call it.
__device__ int list_segment(const Down& problem, int segment, Shared& shared) {
  const int index = segment * kThreads + threadIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t bits = 0;
  if (index < (problem.ffn + 31) / 32) bits = problem.fired[index];
  int through = __popc(bits);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.warp_sums[warp] = through;
  __syncthreads();
  int total = 0, at = through - __popc(bits);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) at += shared.warp_sums[i];
    total += shared.warp_sums[i];
  }
  for (; bits != 0; bits &= bits - 1) {
    shared.list[at++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(bits) - 1);
  }
  __syncthreads();
  return total;
}

// 16-byte piece of a row of Pieces in shared memory, swizzled for ldmatrix.
template <int Pieces>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return (row * Pieces + (piece ^ (row % 8 / (8 / Pieces)))) * 16;
}

// The warp's stage gets neurons first .. first + 15 of the list, zeros past its end.
__device__ __forceinline__ void gather(const Down& problem, const uint16_t* list, int base,
                                       int first, int count, int column, uint32_t stage) {
  if (first < count) {
    const int lane = threadIdx.x % 32;
    {
      const int row = lane / 2, at = column + lane % 2 * 8;
      const bool valid = first + row < count && at < problem.width;
      const __nv_bfloat16* from = problem.weight;
      if (valid) from += int64_t{base + list[first + row]} * problem.width + at;
      sm90::gather16(stage + swizzled<2>(row, lane % 2), from, valid);
    }
    if (lane < kGroup) {
      const bool valid = first + lane < count;
      const __nv_bfloat16* from = problem.hidden;
      if (valid) from += int64_t{base + list[first + lane]} * kTokens;
      sm90::gather16(stage + kWeightStage + swizzled<1>(lane, 0), from, valid);
    }
  }
  gathers_commit();
}

__device__ __forceinline__ void multiply(float (&acc)[4], uint32_t stage) {
  const int lane = threadIdx.x % 32;
  uint32_t a[4], b[2];
  load_matrices_transposed(a, stage + swizzled<2>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  load_matrices_transposed(b, stage + kWeightStage + swizzled<1>(lane % 16, 0));
  mma_16x8x16(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
}

__global__ void __launch_bounds__(kThreads) down_sm90_kernel(const __grid_constant__ Down problem) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kColumns;
  const uint32_t ring = sm90::smem_address(shared.ring[warp]);
  float acc[4] = {};
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  for (int segment = 0; segment * kSegment < problem.ffn; ++segment) {
    const int count = list_segment(problem, segment, shared);
    const auto fill = [&](int first, int stage) {
      gather(problem, shared.list, segment * kSegment, first, count, column, ring + stage * kStage);
    };
    constexpr int kStride = kWarps * kGroup;
#pragma unroll
    for (int i = 0; i < kStages; ++i) fill(warp * kGroup + i * kStride, i);
    int stage = 0;
    for (int first = warp * kGroup; first < count; first += kStride) {
      gathers_wait<kStages - 1>();
      __syncwarp();
      multiply(acc, ring + stage * kStage);
      __syncwarp();
      fill(first + kStages * kStride, stage);
      stage = (stage + 1) % kStages;
    }
    gathers_wait<0>();
    __syncthreads();  // the list and the ring may be overwritten
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = lane % 4 * 2 + i % 2, row = lane / 4 + i / 2 * 8;
    *reinterpret_cast<float*>(shared.partials[warp] + token * kPartialPitch + row * 4) = acc[i];
  }
  __syncthreads();
  const int token = threadIdx.x / 4, four = threadIdx.x % 4 * 4;
  if (token >= problem.tokens || column + four >= problem.width) return;
  float4 sum{};
#pragma unroll
  for (int from = 0; from < kWarps; ++from) {
    const float4 v =
        *reinterpret_cast<const float4*>(shared.partials[from] + token * kPartialPitch + four * 4);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  const int64_t at = int64_t{token} * problem.width + column + four;
  if (problem.residual != nullptr) {
    const auto* from = reinterpret_cast<const __nv_bfloat162*>(problem.residual + at);
    const float2 low = __bfloat1622float2(from[0]), high = __bfloat1622float2(from[1]);
    sum = {sum.x + low.x, sum.y + low.y, sum.z + high.x, sum.w + high.y};
  }
  auto* to = reinterpret_cast<__nv_bfloat162*>(problem.y + at);
  to[0] = __floats2bfloat162_rn(sum.x, sum.y);
  to[1] = __floats2bfloat162_rn(sum.z, sum.w);
}

}  // namespace

cudaError_t launch_down_sm90(const Down& problem, cudaStream_t stream) {
  constexpr int kShared = sizeof(Shared);
  const cudaError_t status =
      cudaFuncSetAttribute(down_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(down_sm90_kernel, dim3((problem.width + kColumns - 1) / kColumns),
                                kThreads, kShared, stream, problem);
}

}  // namespace twell::few_token
