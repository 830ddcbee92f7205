// SPDX-License-Identifier: Apache-2.0
// RMSNorm on the GPU, with the residual addition in front of it fused in. bf16, sums in f32.
//   s = x + residual (or x);  y = s * rsqrt(mean(s^2) + eps) * weight
// s is rounded to bf16 before it is normalised, as it is stored. D is a multiple of 8, at most
// kMaxNormWidth.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

inline constexpr int64_t kMaxNormWidth = 16384;

struct RmsNormCuda {
  int64_t tokens = 0;                       // M
  int64_t width = 0;                        // D
  const __nv_bfloat16* x = nullptr;         // [M, D]
  const __nv_bfloat16* residual = nullptr;  // [M, D] or null
  __nv_bfloat16* sum = nullptr;             // [M, D] s; needed with a residual, may be either input
  const __nv_bfloat16* weight = nullptr;    // [D]
  __nv_bfloat16* y = nullptr;               // [M, D], may be x when there is no residual
  float eps = 1e-5f;
};
// cudaErrorInvalidValue for a width that is not supported.
cudaError_t launch_rms_norm(const RmsNormCuda& problem, cudaStream_t stream);

}  // namespace twell
