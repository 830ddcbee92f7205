// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/count_rows.h"

#include <algorithm>

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxCtas = 128;

__global__ void __launch_bounds__(kThreads)
    count_rows_kernel(const int32_t* row_nnz, int64_t tokens, ActivityCuda* activity) {
  unsigned long long sum = 0;
  int most = 0;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < tokens;
       row += int64_t{gridDim.x} * kThreads) {
    sum += static_cast<unsigned long long>(row_nnz[row]);
    most = max(most, row_nnz[row]);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&activity->nnz, sum);
    atomicMax(&activity->max_row_nnz, static_cast<unsigned long long>(most));
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&activity->tokens, static_cast<unsigned long long>(tokens));
  }
}

}  // namespace

cudaError_t launch_count_rows(const int32_t* row_nnz, int64_t tokens, ActivityCuda* activity,
                              cudaStream_t stream) {
  const int64_t ctas = std::min((tokens + kThreads - 1) / kThreads, kMaxCtas);
  count_rows_kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(row_nnz, tokens,
                                                                          activity);
  return cudaGetLastError();
}

}  // namespace twell
