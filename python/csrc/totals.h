// SPDX-License-Identifier: Apache-2.0
// The counts of one training call on the GPU, handed to PyTorch and added to the plan's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell::python {

struct ReportCall {
  FfnTrainCountsCuda* call = nullptr;    // of this call; cleared, so that the next one starts at 0
  FfnTrainCountsCuda* totals = nullptr;  // added to
  int64_t* counts = nullptr;             // [4] out: tokens, nnz, union neurons, most of one token
  float* l1 = nullptr;                   // one value out: the sum of |h|
};
void launch_report_call(const ReportCall& report, cudaStream_t stream);

}  // namespace twell::python
