// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/sparse_up_down/tile_union_down_sm90.cuh"
#include "twell/ops/sparse_up_down/tile_union_up_sm90.cuh"

namespace twell::tile_union {

cudaError_t launch_up_sm90(const Gemm& gemm, int ctas, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(
      up::tile_union_up_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, up::kSharedBytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(up::tile_union_up_sm90_kernel, dim3(ctas), kThreads,
                                up::kSharedBytes, stream, gemm);
}

cudaError_t launch_down_sm90(const Gemm& gemm, int ctas, cudaStream_t stream) {
  const cudaError_t status =
      cudaFuncSetAttribute(down::tile_union_down_sm90_kernel,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, down::kSharedBytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(down::tile_union_down_sm90_kernel, dim3(ctas), kThreads,
                                down::kSharedBytes, stream, gemm);
}

}  // namespace twell::tile_union
