// SPDX-License-Identifier: Apache-2.0
// Launches: properties of the current device, dynamic shared memory, thread block clusters.
//
// Programmatic dependent launch (PDL): a kernel may start while the previous one on the stream
// still runs, and waits for it on the device. Works in graph capture. Where the code that the GPU
// runs is for GPUs before Hopper, which lack it, launch_dependent is an ordinary launch and the
// device functions do nothing. Source: CUDA programming guide, "Programmatic Dependent Launch and
// Synchronization".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "twell/base/dependent_launch.cuh"
#include "twell/base/gpu_code.h"

namespace twell::gpu {

// Threads that an SM holds, for the least CTAs of __launch_bounds__. Host code sees the larger one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && \
    __CUDA_ARCH__ / 10 != 100
inline constexpr int kSmThreads = 1536;
#else
inline constexpr int kSmThreads = 2048;
#endif

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

// Reads an attribute of the current device, as the build sees it (gpu_code.h).
inline cudaError_t device_attribute(int& value, cudaDeviceAttr attribute) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) value = seen_shared_memory(value);
  return status;
}

// Launches a grid of thread block clusters, or of single CTAs if cluster is 0, as a dependent of
// the previous kernel.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 cluster,
                                      int threads, uint32_t shared_bytes, cudaStream_t stream,
                                      Arguments&&... arguments) {
  bool dependent = false;
  const cudaError_t status = ask_dependent_launch(dependent);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !dependent ? 0 : cluster.x == 0 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads,
                             uint32_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  return launch_dependent_clusters(kernel, grid, dim3(0), threads, shared_bytes, stream,
                                   arguments...);
}

// Allows a kernel as much dynamic shared memory on the current device as an SM can give it besides
// its static shared memory. Always the whole, for kernels whose launches differ in size: the limit
// belongs to the process, so that one set for a narrow model could come between another thread's
// call for a wide one and its launch.
template <typename Kernel>
cudaError_t allow_most_shared_memory(Kernel* kernel) {
  cudaFuncAttributes now{};
  int most = 0;
  cudaError_t status = cudaFuncGetAttributes(&now, kernel);
  if (status == cudaSuccess) {
    status = device_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }
  most -= static_cast<int>(now.sharedSizeBytes);
  if (status != cudaSuccess || now.maxDynamicSharedSizeBytes == most) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

}  // namespace twell::gpu
