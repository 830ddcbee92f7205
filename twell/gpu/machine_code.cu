// SPDX-License-Identifier: Apache-2.0
#include "twell/gpu/machine_code_cuda.h"

namespace twell {
namespace {

constexpr int kBuilt[] = {0, TWELL_MACHINE_CODE};  // none in a portable build of PTX alone

// Compiled as all portable kernels are.
__global__ void machine_code_kernel() {}

}  // namespace

cudaError_t machine_code_cuda(GpuCode& code) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, machine_code_kernel);
  code = {.binary = attributes.binaryVersion, .ptx = attributes.ptxVersion};
  return status;
}

std::span<const int> built_machine_code() { return std::span(kBuilt).subspan(1); }

}  // namespace twell
