// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/hopper/gate_gemm_sm90.cuh"

#include <algorithm>

namespace twell::gate_gemm {
namespace {

constexpr int kClearThreads = 1024;

// Lets the GEMM start once all that came before is complete, and while it clears.
__global__ void __launch_bounds__(kClearThreads)
    clear_rows_kernel(int32_t* row_nnz, int rows, int32_t* progress, int64_t progress_words) {
  sm90::wait_for_previous_kernel();
  sm90::allow_next_kernel();
  const int64_t i = int64_t{blockIdx.x} * kClearThreads + threadIdx.x;
  if (i < rows) row_nnz[i] = 0;
  if (i < progress_words) progress[i] = 0;
}

}  // namespace

cudaError_t launch_gate_gemm_sm90(const Params& params, int64_t progress_words, int ctas,
                                  cudaStream_t stream) {
  cudaError_t status = cudaFuncSetAttribute(
      gate_gemm_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  const int64_t words = params.packed == nullptr ? 0 : progress_words;
  const int64_t clears = (std::max<int64_t>(params.out.tokens, words) - 1) / kClearThreads + 1;
  status = sm90::launch_dependent(clear_rows_kernel, dim3(static_cast<unsigned>(clears)),
                                  kClearThreads, 0, stream, params.out.row_nnz, params.out.tokens,
                                  params.packed, words);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(gate_gemm_sm90_kernel, dim3(ctas), kThreads, kSharedBytes, stream,
                                params);
}

}  // namespace twell::gate_gemm
