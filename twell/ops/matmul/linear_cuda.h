// SPDX-License-Identifier: Apache-2.0
// A linear layer on the GPU: y [M, N] = x [M, K] w^T, w [N, K], all row-major bf16 (y on request
// f32), f32 accumulation. Up to kFewRows tokens run a kernel that reads the weights once at memory
// speed; more run cuBLASLt, with one plan per shape kept in the context.
// K is a multiple of 8. Never synchronises, but for a new shape while tuning is on.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"

namespace twell {

inline constexpr int64_t kFewRows = 8;

struct LinearCuda {
  int64_t rows = 0;                  // M
  int64_t cols = 0;                  // N
  int64_t inner = 0;                 // K
  const __nv_bfloat16* x = nullptr;  // [M, K]
  const __nv_bfloat16* w = nullptr;  // [N, K]
  void* y = nullptr;                 // [M, N] bf16, or f32
  bool f32_out = false;
};
void linear_cuda(CudaContext& ctx, const LinearCuda& problem);

// While on, a shape seen for the first time times every algorithm that cuBLASLt proposes. A
// stopwatch chooses then, so that another process may round differently: for benchmarks. Off at
// first.
void set_linear_tuning(CudaContext& ctx, bool on);

}  // namespace twell
