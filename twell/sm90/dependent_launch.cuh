// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): a kernel may start while the previous one on the stream
// still runs, and waits for it on the device. Works in graph capture. On GPUs before Hopper, which
// lack it, launch_dependent is an ordinary launch and the device functions do nothing. Source: CUDA
// programming guide, "Programmatic Dependent Launch and Synchronization".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell::sm90 {

// Waits until the kernels before this one on the stream are complete and their writes visible.
// Every kernel launched by launch_dependent calls it before it touches memory that an earlier
// kernel writes, or writes memory that one reads.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start, once all CTAs of this one have called it or ended.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads,
                             uint32_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  int device = 0, major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace twell::sm90
