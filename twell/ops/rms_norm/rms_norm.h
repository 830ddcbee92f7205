// SPDX-License-Identifier: Apache-2.0
// RMSNorm, fused with the residual addition in front of it.
//   s = x + residual (or x);  y = scale * s * rsqrt(mean(s^2) + eps) * weight
//   x, residual, sum, y [M, D] f32; weight [D]; inv_rms [M].
#pragma once

#include <span>

#include "twell/base/context.h"
#include "twell/base/matrix.h"

namespace twell {

struct RmsNormForward {
  ConstMatrixF x;                 // [M, D]
  ConstMatrixF residual = {};     // [M, D] or empty
  MatrixF sum = {};               // [M, D] s; needed with a residual, may be x itself; else empty
  const float* weight = nullptr;  // [D]
  MatrixF y;                      // [M, D]
  float* inv_rms = nullptr;       // [M] or null (inference)
  float eps = 1e-5f;
  float scale = 1.0f;
};
void rms_norm_forward(Context& ctx, const RmsNormForward& problem);

struct RmsNormBackward {
  ConstMatrixF s;                  // [M, D] input of the norm
  const float* weight = nullptr;   // [D]
  const float* inv_rms = nullptr;  // [M] of the forward
  ConstMatrixF d_y;                // [M, D]
  MatrixF d_s;                     // [M, D] accumulated into: it holds the residual path's gradient
  float* d_weight = nullptr;       // [D] accumulated
  float scale = 1.0f;              // of the forward
};
void rms_norm_backward(Context& ctx, const RmsNormBackward& problem);

// RMSNorm of each head of queries or keys, before the rotation (Qwen3): in place on x [M, heads *
// hd], with one weight [hd] for all heads. inv_rms [heads * M], head by head, or null (inference).
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
