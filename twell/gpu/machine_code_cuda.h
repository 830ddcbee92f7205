// SPDX-License-Identifier: Apache-2.0
// Which machine code of portable kernels runs on the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "twell/base/gpu_code.h"

namespace twell {

// Asks the driver, which compiles a kernel for that where there is no machine code.
cudaError_t machine_code_cuda(GpuCode& code);

// The capabilities with machine code of portable kernels in this build.
std::span<const int> built_machine_code();

}  // namespace twell
