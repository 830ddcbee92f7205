// SPDX-License-Identifier: Apache-2.0
// Elementwise work on a GPU: op(i) for i in [0, n), a thread each. op is a copyable object with
//   __device__ void operator()(int64_t i) const
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

inline constexpr int kForEachThreads = 256;

template <typename Op>
__global__ void __launch_bounds__(kForEachThreads) for_each_kernel(int64_t n, Op op) {
  const int64_t i = int64_t{blockIdx.x} * kForEachThreads + threadIdx.x;
  if (i < n) op(i);
}

template <typename Op>
cudaError_t launch_for_each(int64_t n, const Op& op, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const auto ctas = static_cast<unsigned>((n + kForEachThreads - 1) / kForEachThreads);
  for_each_kernel<<<ctas, kForEachThreads, 0, stream>>>(n, op);
  return cudaGetLastError();
}

}  // namespace twell
