// SPDX-License-Identifier: Apache-2.0
// What `twell doctor` says of a GPU: which machine code it runs, which executions of feed-forward
// layers that leaves, and whether it is as fast as their costs take it for. Plain text without CUDA
// headers.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "twell/base/gpu_code.h"
#include "twell/ops/ffn/gpu_layer.h"

namespace twell {

struct GpuReport {
  int compute_capability = 0;  // the GPU's own
  GpuCode code;                // what the driver says of a portable kernel
  std::span<const int> built;  // capabilities with machine code of portable kernels
  bool portable = kPortableBuild;
};

// "native code for 8.9", "PTX for 8.0, which the driver compiles for 12.0".
std::string gpu_machine_code(const GpuReport& report);
// Names of the executions that take such a GPU, and of those that `auto` weighs.
std::vector<std::string> gpu_executions(const GpuReport& report);
std::vector<std::string> gpu_auto_executions(const GpuReport& report);
// A line for each of these, and one where TwELL's tests have not run on such a GPU.
std::vector<std::string> gpu_report_lines(const GpuReport& report);

// What a GPU was measured to do.
struct GpuFigures {
  double bandwidth = 0.0;  // bytes of device memory read per microsecond
  double mma_flops = 0.0;  // bf16 multiplications and additions of mma.sync per microsecond
  double launch_us = 0.0;  // a kernel without work, behind others
};
// A line for each beside what costs follow from, and one that says whether they hold. `device` is
// what the costs take the GPU for.
std::vector<std::string> gpu_calibration_lines(const GpuDevice& device, const GpuFigures& measured);

}  // namespace twell
