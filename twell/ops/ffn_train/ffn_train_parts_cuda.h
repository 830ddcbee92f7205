// SPDX-License-Identifier: Apache-2.0
// The memory behind ffn_train_cuda.h and the executions that use it.
#pragma once

#include "twell/ops/ffn_train/dense_train_kernels.h"
#include "twell/ops/ffn_train/ffn_train_cuda.h"

namespace twell {

struct FfnSavedCuda::Parts {
  FfnTrainShapeCuda shape;
  FfnTrainExecution execution = FfnTrainExecution::kDense;
  int64_t tokens = 0;                // of the forward whose activations these are, or 0
  DeviceBuffer<__nv_bfloat16> gate;  // dense: [max_tokens, F] g, without a gate h
  DeviceBuffer<__nv_bfloat16> up;    // dense: [max_tokens, F] u, with a gate only
};

struct FfnTrainWorkspaceCuda::Parts {
  FfnTrainShapeCuda shape;
  DeviceBuffer<__nv_bfloat16> hidden;  // [max_tokens, F] h, then d_h
  DeviceBuffer<double> sum_parts;      // [hidden_ctas(max_tokens)]
  DeviceBuffer<uint32_t> ticket;       // 0 between calls
};

namespace ffn_train {

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                        FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);
void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace);

}  // namespace ffn_train
}  // namespace twell
