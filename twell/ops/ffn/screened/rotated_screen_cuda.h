// SPDX-License-Identifier: Apache-2.0
// Makes rotated screens (rotated_screen.h) on the GPU: 8-bit rows of w_gate, and of x by itself or
// together with the RMSNorm that makes it. bf16 in, transforms in f32. A row's result depends on
// nothing but the row, for strict bounds the gate's `rounding`, and the kernel, which is another
// from 1,024 rows on: f32 sums in another order may move a value by one where it lies between two,
// or a bound by its rounding. Launches are programmatic dependents, can be captured, and return
// cudaErrorInvalidValue where can_rotate(D) is false.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/ffn/screened/rotated_screen.h"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {

struct RotateGateCuda {
  int64_t neurons = 0;                    // F
  int64_t width = 0;                      // D
  const __nv_bfloat16* w_gate = nullptr;  // [F, D]
  int8_t* values = nullptr;               // [F, D]
  int32_t* spread = nullptr;              // [F rounded up to 256]
  float* rounding = nullptr;              // [1]; may be null for the probabilistic bound
  ScreenBound bound = ScreenBound::kStrict;
};
cudaError_t launch_rotate_gate(const RotateGateCuda& problem, cudaStream_t stream);

struct RotateRowsCuda {
  int64_t tokens = 0;                // M
  int64_t width = 0;                 // D
  const __nv_bfloat16* x = nullptr;  // [M, D]
  RotatedRowsCuda rotated;
  const float* rounding = nullptr;  // of the gate; may be null for the probabilistic bound
  ScreenBound bound = ScreenBound::kStrict;
};
cudaError_t launch_rotate_rows(const RotateRowsCuda& problem, cudaStream_t stream);

// launch_rms_norm, with the same bits in y and sum, and the rotated rows of y, in the same order.
struct RotateNormCuda {
  RmsNormCuda norm;
  RotatedRowsCuda rotated;
  const float* rounding = nullptr;  // of the gate; may be null for the probabilistic bound
  ScreenBound bound = ScreenBound::kStrict;
};
cudaError_t launch_rotate_norm(const RotateNormCuda& problem, cudaStream_t stream);

}  // namespace twell
