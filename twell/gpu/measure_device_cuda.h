// SPDX-License-Identifier: Apache-2.0
// What the current device reaches: the figures that the costs of executions derive from what the
// driver says of it (gpu_device_of).
#pragma once

#include <cuda_runtime_api.h>

namespace twell {

struct DeviceFigures {
  double bandwidth = 0.0;  // bytes of device memory read per microsecond
  double mma_flops = 0.0;  // bf16 multiplications and additions of mma.sync per microsecond
  double launch_us = 0.0;  // from a kernel without work to the next one on the stream
};

// Takes up to 1 GiB of device memory and some 20 ms; waits for the device. The best of several
// runs each.
cudaError_t measure_device_cuda(cudaStream_t stream, DeviceFigures& figures);

}  // namespace twell
