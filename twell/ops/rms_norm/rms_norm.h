// SPDX-License-Identifier: Apache-2.0
// RMSNorm, fused with the residual addition in front of it.
//   s = x + residual (or x);  y = s * rsqrt(mean(s^2) + eps) * weight
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
};
void rms_norm_forward(Context& ctx, const RmsNormForward& problem);

struct RmsNormBackward {
  ConstMatrixF s;                  // [M, D] input of the norm
  const float* weight = nullptr;   // [D]
  const float* inv_rms = nullptr;  // [M] of the forward
  ConstMatrixF d_y;                // [M, D]
  MatrixF d_s;                     // [M, D] accumulated into: it holds the residual path's gradient
  float* d_weight = nullptr;       // [D] accumulated
};
void rms_norm_backward(Context& ctx, const RmsNormBackward& problem);

}  // namespace twell
