// SPDX-License-Identifier: Apache-2.0
// A linear layer on the GPU, forward and backward: y [M, N] = x [M, K] w^T, w [N, K], all row-major
// bf16 (y optionally f32), f32 accumulation. Few rows run kernels that read the weights once at
// memory speed (route::linear_kernel); more run cuBLASLt, with one plan per shape kept in the
// context. K is a multiple of 8. Synchronises only for a new shape while tuning is on
// (set_matmul_tuning).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"

namespace twell {

struct LinearCuda {
  int64_t rows = 0;                  // M
  int64_t cols = 0;                  // N
  int64_t inner = 0;                 // K
  const __nv_bfloat16* x = nullptr;  // [M, K]
  const __nv_bfloat16* w = nullptr;  // [N, K]
  void* y = nullptr;                 // [M, N] bf16, or f32
  bool f32_out = false;
  bool add = false;               // y += instead of =, in bf16
  bool constant_weights = false;  // nothing enqueued earlier on the stream writes them
};
void linear_cuda(CudaContext& ctx, const LinearCuda& problem);

// d_x [M, K] = d_y w and d_w [N, K] = d_y^T x; either may be left out. Weight gradients are summed
// and stored in f32. K is a multiple of 8, M at least 1; N may be anything, a multiple of 8 is
// fast.
struct LinearBackwardCuda {
  int64_t rows = 0;                    // M
  int64_t cols = 0;                    // N
  int64_t inner = 0;                   // K
  const __nv_bfloat16* x = nullptr;    // [M, K], for d_w
  const __nv_bfloat16* w = nullptr;    // [N, K], for d_x
  const __nv_bfloat16* d_y = nullptr;  // [M, N]
  __nv_bfloat16* d_x = nullptr;        // [M, K] or null
  bool d_x_add = false;                // d_x += instead of =, in bf16
  float* d_w = nullptr;                // [N, K] or null
  bool d_w_add = true;                 // d_w += instead of =
  int64_t d_y_stride = 0;              // values from row to row of d_y; 0: N
};
void linear_backward_cuda(CudaContext& ctx, const LinearBackwardCuda& problem);

}  // namespace twell
