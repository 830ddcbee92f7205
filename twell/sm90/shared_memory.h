// SPDX-License-Identifier: Apache-2.0
// Dynamic shared memory beyond the 48 KiB that every kernel may use.
#pragma once

#include <cuda_runtime.h>

namespace twell::sm90 {

// Allows a kernel as much on the current device as an SM can give it besides its static shared
// memory. Always the whole, for kernels whose launches differ in size: the limit belongs to the
// process, so that one set for a narrow model could come between another thread's call for a wide
// one and its launch.
template <typename Kernel>
cudaError_t allow_most_shared_memory(Kernel* kernel) {
  cudaFuncAttributes now{};
  int device = 0, most = 0;
  cudaError_t status = cudaFuncGetAttributes(&now, kernel);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  most -= static_cast<int>(now.sharedSizeBytes);
  if (status != cudaSuccess || now.maxDynamicSharedSizeBytes == most) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

}  // namespace twell::sm90
