// SPDX-License-Identifier: Apache-2.0
// RMSNorm over each head of queries or keys, before the rotation (Qwen3). x [M, heads * hd],
// one weight [hd] for all heads. Internal to model.
#pragma once

#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

// Works in place. inv_rms [heads * M], head by head, for the backward pass; null for inference.
void head_norm_forward(Context& ctx, MatrixF x, int64_t head_dim, const float* weight, float eps,
                       float* inv_rms = nullptr);

struct HeadNormBackward {
  ConstMatrixF x;  // [M, heads * hd] input of the norm
  int64_t head_dim = 0;
  const float* weight = nullptr;   // [hd]
  const float* inv_rms = nullptr;  // [heads * M] of the forward
  MatrixF d;                       // [M, heads * hd] in: gradient of the output; out: of x
  float* d_weight = nullptr;       // [hd] accumulated
};
void head_norm_backward(Context& ctx, const HeadNormBackward& problem);

}  // namespace twell
