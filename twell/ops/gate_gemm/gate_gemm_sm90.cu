// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/gate_gemm/gate_gemm_sm90.cuh"

namespace twell::gate_gemm {
namespace {

constexpr int kClearThreads = 1024;

// Lets the GEMM start once all that came before is complete, and while it clears.
__global__ void __launch_bounds__(kClearThreads) clear_rows_kernel(int32_t* row_nnz, int rows) {
  sm90::wait_for_previous_kernel();
  sm90::allow_next_kernel();
  const int row = static_cast<int>(blockIdx.x) * kClearThreads + static_cast<int>(threadIdx.x);
  if (row < rows) row_nnz[row] = 0;
}

}  // namespace

cudaError_t launch_gate_gemm_sm90(const Params& params, int ctas, cudaStream_t stream) {
  cudaError_t status = cudaFuncSetAttribute(
      gate_gemm_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, paired_gemm::kRingBytes);
  if (status != cudaSuccess) return status;
  const auto clears = static_cast<unsigned>((params.out.tokens - 1) / kClearThreads + 1);
  status = sm90::launch_dependent(clear_rows_kernel, dim3(clears), kClearThreads, 0, stream,
                                  params.out.row_nnz, params.out.tokens);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(gate_gemm_sm90_kernel, dim3(ctas), kThreads,
                                paired_gemm::kRingBytes, stream, params);
}

}  // namespace twell::gate_gemm
