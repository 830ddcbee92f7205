// SPDX-License-Identifier: Apache-2.0
#include "twell/base/cuda.h"

namespace twell {

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  throw_error(file, line,
              fmt::format("{} failed: {} ({})", call, cudaGetErrorName(status),
                          cudaGetErrorString(status)));
}

CudaContext::CudaContext(cudaStream_t stream) : stream_(stream) {
  TWELL_CUDA_CHECK(cudaGetDevice(&device_));
  cudaDeviceProp properties{};
  TWELL_CUDA_CHECK(cudaGetDeviceProperties(&properties, device_));
  multiprocessors_ = properties.multiProcessorCount;
  compute_capability_ = properties.major * 10 + properties.minor;
  device_name_ = properties.name;
}

std::string cuda_unavailable() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) {
    return fmt::format("{} ({})", cudaGetErrorName(status), cudaGetErrorString(status));
  }
  return devices == 0 ? "the CUDA runtime sees no device" : std::string();
}

}  // namespace twell
