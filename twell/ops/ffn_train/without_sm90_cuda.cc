// SPDX-License-Identifier: Apache-2.0
// In place of weight_grads_sm90.cu in portable builds (TWELL_PORTABLE).
#include <cuda_runtime.h>

#include "twell/base/no_hopper.h"

namespace twell::ffn_train {

struct WeightGrads;  // weight_grads.cuh, which only nvcc reads
cudaError_t launch_weight_grads_sm90(const WeightGrads&, int, cudaStream_t) {
  no_hopper_kernel("weight gradients");
}

}  // namespace twell::ffn_train
