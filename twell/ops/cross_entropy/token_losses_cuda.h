// SPDX-License-Identifier: Apache-2.0
// -log p(targets[m]) of every row of logits on the GPU, 0 where there is no target (-1).
//   logits [M, V] f32, targets [M] int32, losses [M] f32: device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct TokenLossesCuda {
  int64_t tokens = 0;                // M
  int64_t vocab = 0;                 // V
  const float* logits = nullptr;     // [M, V]
  const int32_t* targets = nullptr;  // [M] in [-1, V), checked by the caller
  float* losses = nullptr;           // [M] out
};
cudaError_t launch_token_losses(const TokenLossesCuda& problem, cudaStream_t stream);

}  // namespace twell
