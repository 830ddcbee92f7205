// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "twell/ops/ffn/portable/row_fused_warp.cuh"

namespace twell::row_fused {
namespace {

constexpr int kLightWarps = 4;
constexpr int kHeavyWarps = 8;
// Weight rows asked for ahead. At D = 2048 the rings take 48 and 64 KiB per CTA.
constexpr int kLightDepth = 3;
constexpr int kHeavyDepth = 2;
constexpr int kQuarters = 4;  // units of work of a heavy row: a quarter of a tile

// A warp per (row, chunk of columns).
template <int Pieces>
__global__ void __launch_bounds__(kLightWarps * 32) light_rows_kernel(const Problem problem) {
  extern __shared__ __align__(16) uint8_t rings[];
  __shared__ NonzeroList lists[kLightWarps];
  const int64_t row = int64_t{blockIdx.x} * kLightWarps + threadIdx.x / 32;
  const int chunk = blockIdx.y;
  if (row >= problem.rows) return;
  const int nnz = problem.row_nnz[row];
  if (nnz > kListed) {
    if (chunk == 0 && lane_id() == 0) {
      problem.heavy_rows[atomicAdd(&problem.counters->heavy_rows, 1)] = static_cast<int32_t>(row);
    }
    return;
  }
  if (nnz == 0 && problem.add) return;
  float acc[Pieces][8] = {};
  if (nnz > 0) {
    RowPiece<Pieces> x;
    if (problem.w_up != nullptr) x.load(problem.x + row * problem.width, problem.width);
    NonzeroList& list = lists[threadIdx.x / 32];
    const int size = list_row(problem, row, list);
    uint8_t* ring = rings + threadIdx.x / 32 * WeightRows<Pieces, kLightDepth>::kRingBytes;
    multiply_list<Pieces, kLightDepth>(problem, x, row, list, size, chunk * kChunk, ring, acc);
  }
  store_row(problem, row, chunk * kChunk, acc);
}

// Sums the warps' accumulators into warp 0's, halving the number of warps: a fixed order.
template <int Pieces>
__device__ void reduce_warps(float (&acc)[Pieces][8], float* shared) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int half = kHeavyWarps / 2; half > 0; half /= 2) {
    float4* slot = reinterpret_cast<float4*>(shared) + (warp % half) * Pieces * 64 + lane_id();
    __syncthreads();
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < Pieces * 2; ++i) {
        const float* a = &acc[i / 2][i % 2 * 4];
        slot[i * 32] = make_float4(a[0], a[1], a[2], a[3]);
      }
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int i = 0; i < Pieces * 2; ++i) {
        const float4 v = slot[i * 32];
        float* a = &acc[i / 2][i % 2 * 4];
        a[0] += v.x;
        a[1] += v.y;
        a[2] += v.z;
        a[3] += v.w;
      }
    }
  }
}

// Writes this part's sums, and the row of y if it is the last part to do so.
template <int Pieces>
__device__ void finish_part(const Problem& problem, int64_t row, int heavy, int chunk, int part,
                            int parts, float (&acc)[Pieces][8]) {
  __shared__ bool last;
  const int begin = chunk * kChunk;
  float* partials = problem.partials + int64_t{heavy} * parts * problem.width;
  if (threadIdx.x < 32) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      const int at = begin + (i * 32 + lane_id()) * 8;
      if (at >= problem.width) continue;
      auto* to = reinterpret_cast<float4*>(partials + int64_t{part} * problem.width + at);
      to[0] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      to[1] = make_float4(acc[i][4], acc[i][5], acc[i][6], acc[i][7]);
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) {
      int32_t* done = problem.parts_done + int64_t{heavy} * problem.chunks + chunk;
      last = atomicAdd(done, 1) == parts - 1;
      if (last) *done = 0;  // for the next call
      __threadfence();
    }
  }
  __syncthreads();
  if (!last) return;
  const int end = min(problem.width, begin + Pieces * 256);
  for (int at = begin + threadIdx.x * 4; at < end; at += kHeavyWarps * 32 * 4) {
    auto* to = reinterpret_cast<__nv_bfloat162*>(problem.y + row * problem.width + at);
    float4 sum{};
    if (problem.add) {
      const float2 low = __bfloat1622float2(to[0]), high = __bfloat1622float2(to[1]);
      sum = {low.x, low.y, high.x, high.y};
    }
    for (int i = 0; i < parts; ++i) {
      const float4 v =
          __ldcg(reinterpret_cast<const float4*>(partials + int64_t{i} * problem.width + at));
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    to[0] = __floats2bfloat162_rn(sum.x, sum.y);
    to[1] = __floats2bfloat162_rn(sum.z, sum.w);
  }
}

// A CTA per (heavy row, part, chunk); its warps take quarters of tiles in turn.
template <int Pieces>
__global__ void __launch_bounds__(kHeavyWarps * 32) heavy_rows_kernel(const Problem problem) {
  __shared__ NonzeroList lists[kHeavyWarps];
  extern __shared__ __align__(16) uint8_t rings[];  // then what reduce_warps exchanges
  using Rows = WeightRows<Pieces, kHeavyDepth>;
  static_assert(kHeavyWarps * Rows::kRingBytes >= kHeavyWarps / 2 * Pieces * 1024);
  const int count = problem.counters->heavy_rows;
  const int warp = threadIdx.x / 32;
  const int units = problem.col_tiles * kQuarters;
  int parts = 1;
  if (count > 0 && count < kSplitTarget) {
    parts = min(min((kSplitTarget + count - 1) / count, kMaxParts),
                (units + kHeavyWarps - 1) / kHeavyWarps);
  }
  const int64_t items = int64_t{count} * parts * problem.chunks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int chunk = static_cast<int>(item % problem.chunks);
    const int part = static_cast<int>(item / problem.chunks % parts);
    const int heavy = static_cast<int>(item / problem.chunks / parts);
    const int64_t row = problem.heavy_rows[heavy];
    NonzeroList& list = lists[warp];
    float acc[Pieces][8] = {};
    for (int unit = part * kHeavyWarps + warp; unit < units; unit += parts * kHeavyWarps) {
      const int size = list_quarter(problem, row, unit / kQuarters, unit % kQuarters, list);
      if (size > 0) {
        RowPiece<Pieces> x;
        if (problem.w_up != nullptr) x.load(problem.x + row * problem.width, problem.width);
        multiply_list<Pieces, kHeavyDepth>(problem, x, row, list, size, chunk * kChunk,
                                           rings + warp * Rows::kRingBytes, acc);
      }
      __syncwarp();  // before the list is written again
    }
    reduce_warps(acc, reinterpret_cast<float*>(rings));
    if (parts > 1) {
      finish_part(problem, row, heavy, chunk, part, parts, acc);
    } else if (warp == 0) {
      store_row(problem, row, chunk * kChunk, acc);
    }
    __syncthreads();
  }
  // The last CTA clears the list for the next call: no CTA reads the count any more.
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&problem.counters->ctas_done, 1) == static_cast<int>(gridDim.x) - 1) {
      problem.counters->heavy_rows = 0;
      problem.counters->ctas_done = 0;
    }
  }
}

template <typename Launch>
cudaError_t dispatch(int width, const Launch& launch) {
  if (width <= 256) return launch(std::integral_constant<int, 1>());
  if (width <= 512) return launch(std::integral_constant<int, 2>());
  if (width <= 1024) return launch(std::integral_constant<int, 4>());
  return launch(std::integral_constant<int, 8>());
}
static_assert(kChunk == 8 * 256);

}  // namespace

cudaError_t launch_light_rows(const Problem& problem, cudaStream_t stream) {
  return dispatch(problem.width, [&](auto pieces) {
    const dim3 grid(static_cast<unsigned>((problem.rows + kLightWarps - 1) / kLightWarps),
                    static_cast<unsigned>(problem.chunks));
    constexpr int kPieces = decltype(pieces)::value;
    constexpr int kShared = kLightWarps * WeightRows<kPieces, kLightDepth>::kRingBytes;
    const cudaError_t status = cudaFuncSetAttribute(
        light_rows_kernel<kPieces>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
    light_rows_kernel<kPieces><<<grid, kLightWarps * 32, kShared, stream>>>(problem);
    return cudaGetLastError();
  });
}

cudaError_t launch_heavy_rows(const Problem& problem, int multiprocessors, cudaStream_t stream) {
  return dispatch(problem.width, [&](auto pieces) {
    constexpr int kPieces = decltype(pieces)::value;
    constexpr int kShared = kHeavyWarps * WeightRows<kPieces, kHeavyDepth>::kRingBytes;
    const cudaError_t status = cudaFuncSetAttribute(
        heavy_rows_kernel<kPieces>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
    heavy_rows_kernel<kPieces><<<2 * multiprocessors, kHeavyWarps * 32, kShared, stream>>>(problem);
    return cudaGetLastError();
  });
}

}  // namespace twell::row_fused
