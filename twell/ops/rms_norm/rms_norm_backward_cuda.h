// SPDX-License-Identifier: Apache-2.0
// Backward of RMSNorm on the GPU (rms_norm.h), with the residual path's gradient added in the same
// pass. bf16, sums in f32; 1 / rms is computed again from s, which is read anyway.
//   d_s = d_residual + gradient through the norm;  d_weight += sum over tokens of d_y * s / rms
// The order of additions depends on M and D alone. D is a multiple of 8, at most kMaxNormWidth.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct RmsNormBackwardCuda {
  int64_t tokens = 0;                         // M
  int64_t width = 0;                          // D
  const __nv_bfloat16* s = nullptr;           // [M, D] input of the norm
  const __nv_bfloat16* weight = nullptr;      // [D]
  const __nv_bfloat16* d_y = nullptr;         // [M, D]
  const __nv_bfloat16* d_residual = nullptr;  // [M, D], or null: none
  __nv_bfloat16* d_s = nullptr;               // [M, D] out, may be d_residual or d_y
  float* d_weight = nullptr;                  // [D] accumulated
  float* partial = nullptr;                   // [rms_norm_backward_partials(M), D] workspace
  float eps = 1e-5f;
};
// Rows of partial sums that the weight's gradient goes through; it grows with the tokens.
int64_t rms_norm_backward_partials(int64_t tokens);
// cudaErrorInvalidValue for a width that is not supported.
cudaError_t launch_rms_norm_backward(const RmsNormBackwardCuda& problem, cudaStream_t stream);

}  // namespace twell
