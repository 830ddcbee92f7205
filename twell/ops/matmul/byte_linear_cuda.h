// SPDX-License-Identifier: Apache-2.0
// A linear layer on the GPU whose operands are e4m3 with a scale per row (format/byte_matrix.h):
//   y [M, N] = x [M, K] w^T [N, K],  times the scales of both rows, f32 sums, y in bf16
// through cuBLASLt, one plan per shape kept in the context. K and N are multiples of 16. Products
// are summed by the tensor cores of Hopper with some 14 bits of mantissa.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/format/byte_matrix_cuda.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct ByteLinearCuda {
  int64_t rows = 0;            // M, at least 1
  int64_t cols = 0;            // N
  int64_t inner = 0;           // K
  ByteRowsCuda x;              // [M, K]
  int64_t x_stride = 0;        // bytes from one row of x to the next, a multiple of 16; 0: K
  ByteRowsCuda w;              // [N, K]
  __nv_bfloat16* y = nullptr;  // [M, N]
  bool add = false;            // y += instead of =, rounded once
};

// Error where cuBLASLt has no such product. The first call of a shape makes its plan, which
// allocates, and synchronises while tuning is on (set_matmul_tuning); later ones never do.
void byte_linear_cuda(CudaContext& ctx, const ByteLinearCuda& problem);

}  // namespace twell
