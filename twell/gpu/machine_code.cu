// SPDX-License-Identifier: Apache-2.0
#include "twell/gpu/machine_code_cuda.h"

namespace twell {
namespace {

// Compiled as all portable kernels are.
__global__ void machine_code_kernel() {}

}  // namespace

cudaError_t machine_code_cuda(GpuCode& code) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, machine_code_kernel);
  code = {.binary = attributes.binaryVersion, .ptx = attributes.ptxVersion};
  return status;
}

}  // namespace twell
