// SPDX-License-Identifier: Apache-2.0
// The second stage of sums over tokens: adds up rows of partial sums, in an order that depends only
// on their number.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {
namespace column_sums {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A block sums as many columns as a warp has lanes; each warp takes every kWarps-th row.
static __global__ void __launch_bounds__(kThreads)
    add_kernel(const float* rows, int64_t count, int64_t width, float* sums) {
  __shared__ float of_warp[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 8
    for (int64_t i = warp; i < count; i += kWarps) sum += rows[i * width + column];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= width) return;
  for (int i = 1; i < kWarps; ++i) sum += of_warp[i][lane];
  sums[column] += sum;
}

}  // namespace column_sums

// sums [width] += the sum of the rows [count, width].
inline cudaError_t launch_add_column_sums(const float* rows, int64_t count, int64_t width,
                                          float* sums, cudaStream_t stream) {
  column_sums::
      add_kernel<<<static_cast<unsigned>((width + 31) / 32), column_sums::kThreads, 0, stream>>>(
          rows, count, width, sums);
  return cudaGetLastError();
}

}  // namespace twell
