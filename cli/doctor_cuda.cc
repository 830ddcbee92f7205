// SPDX-License-Identifier: Apache-2.0
#include "cli/doctor_cuda.h"

#include <fmt/core.h>

#ifdef TWELL_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace twell::cli {

nlohmann::json cuda_report() {
  nlohmann::json report = {{"status", ""}, {"devices", nlohmann::json::array()}};
#ifdef TWELL_HAVE_CUDA
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    report["status"] =
        fmt::format("built for CUDA {}.{}; no usable device: {}", CUDART_VERSION / 1000,
                    CUDART_VERSION % 1000 / 10, cudaGetErrorString(error));
    return report;
  }
  report["status"] = fmt::format("built for CUDA {}.{}, {} device(s)", CUDART_VERSION / 1000,
                                 CUDART_VERSION % 1000 / 10, count);
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    report["devices"].push_back(
        {{"name", properties.name},
         {"compute_capability", fmt::format("{}.{}", properties.major, properties.minor)},
         {"memory_gib", static_cast<double>(properties.totalGlobalMem) / (1 << 30)}});
  }
#else
  report["status"] = "not part of this build (no CUDA toolkit was found when it was configured)";
#endif
  return report;
}

}  // namespace twell::cli
