// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/gate_gemm/gate_gemm_sm90.cuh"

namespace twell::gate_gemm {

cudaError_t launch_gate_gemm_sm90(const Params& params, int ctas, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(
      gate_gemm_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  gate_gemm_sm90_kernel<<<ctas, kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace twell::gate_gemm
