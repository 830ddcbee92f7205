// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a kernel may start while the one before it on the stream still
// runs, and waits for it on the device. Works inside graph capture. Before Hopper, where there is
// no such thing, these are an ordinary launch and nothing. Source: CUDA programming guide,
// "Programmatic Dependent Launch and Synchronization".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell::sm90 {

// All that ran before on the stream is complete and visible. Every kernel launched as dependent
// calls it before it touches memory that an earlier kernel writes or reads.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start, as far as this CTA is concerned.
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
