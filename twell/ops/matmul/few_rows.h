// SPDX-License-Identifier: Apache-2.0
// y [M, N] = x [M, K] w [N, K]^T for 1 to 8 rows of x: a warp per row of w, which is read once.
// K is a multiple of 8. The sum of an element does not depend on M. Internal to matmul.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct FewRows {
  int64_t rows;            // M
  int64_t cols;            // N
  int64_t inner;           // K
  const __nv_bfloat16* x;  // [M, K]
  const __nv_bfloat16* w;  // [N, K]
  void* y;                 // [M, N] bf16 or f32
  bool f32_out;
};
cudaError_t launch_few_rows(const FewRows& problem, cudaStream_t stream);

}  // namespace twell
