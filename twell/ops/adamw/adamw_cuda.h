// SPDX-License-Identifier: Apache-2.0
// AdamW on the GPU over the flat arrays of all parameters: the formula of adamw.h, bit for bit if
// the CPU has fused multiply-add. Whatever changes from step to step is read from device memory, so
// that a captured step can be replayed. Weights are f32 in two halves (split_weight.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/adamw/adamw.h"
#include "twell/ops/adamw/moment_rounding.h"
#include "twell/ops/adamw/split_weight.h"

namespace twell {

// Parameters from `begin` up to the begin of the next run, or the end.
struct AdamWRun {
  int64_t begin = 0;
  bool decay = false;  // weight decay applies; else as with weight_decay 0
  bool skip = false;   // weights and moments stay as they are
};

enum class MomentDType { kF32, kBF16 };  // bf16: storage (moment_rounding.h); arithmetic is f32

// Device memory throughout. The arrays of parameters are 16-byte aligned.
struct AdamWCuda {
  int64_t size = 0;   // N
  int64_t first = 0;  // place of the first parameter among all, a multiple of kRoundingGroup
  uint64_t seed = 0;  // of the rounding of moments in bf16
  const AdamWRun* runs = nullptr;                   // [run_count] ascending, the first begins at 0
  int64_t run_count = 0;                            // at least 1
  const AdamWCoefficients* coefficients = nullptr;  // of this step (adamw_coefficients)
  // The clipping factor on top of coefficients->grad_scale (GradientNorm::clip_factor); null: 1. If
  // it is NaN, the step is skipped: weights and moments stay as they are.
  const float* clip_factor = nullptr;
  const float* grad = nullptr;      // [N]
  __nv_bfloat16* weight = nullptr;  // [N] upper halves
  int16_t* weight_rest = nullptr;   // [N] lower halves
  MomentDType moments = MomentDType::kF32;
  void* exp_avg = nullptr;     // [N] of the moments' type
  void* exp_avg_sq = nullptr;  // [N]
};
cudaError_t launch_adamw(const AdamWCuda& problem, cudaStream_t stream);

// Euclidean norm of all gradients, summed in double in a fixed order, and the factor that reduces
// it to clip_norm (1 if it is not above; NaN if the norm is not finite).
struct GradientNorm {
  double norm = 0.0;
  float clip_factor = 1.0f;
};
struct GradientNormCuda {
  int64_t size = 0;                // N
  const float* grad = nullptr;     // [N]
  double clip_norm = 0.0;          // 0: no clipping
  double* partial = nullptr;       // [gradient_norm_partials(N)] workspace
  GradientNorm* result = nullptr;  // one, out
};
int64_t gradient_norm_partials(int64_t size);
cudaError_t launch_gradient_norm(const GradientNormCuda& problem, cudaStream_t stream);

#ifdef __CUDACC__
// split_weight.h for the types that kernels hold.
__device__ __forceinline__ float join(__nv_bfloat16 upper, int16_t rest) {
  return __uint_as_float(join_weight({__bfloat16_as_ushort(upper), rest}));
}
__device__ __forceinline__ void split(float value, __nv_bfloat16& upper, int16_t& rest) {
  const SplitWeight halves = split_weight(__float_as_uint(value));
  upper = __ushort_as_bfloat16(halves.bf16);
  rest = halves.rest;
}
#endif

}  // namespace twell
