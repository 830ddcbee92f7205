// SPDX-License-Identifier: Apache-2.0
// Whether the current device may launch the including file's kernels by programmatic dependent
// launch.
#pragma once

#include <cuda_runtime.h>

#include "twell/base/gpu_code.h"

namespace twell {

// Internal linkage, because files are compiled for different architectures.
[[maybe_unused]] static cudaError_t ask_dependent_launch(bool& dependent) {
  static constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  dependent = status == cudaSuccess && has_dependent_launch(10 * major + minor, kCompiled);
  return status;
}

}  // namespace twell
