// SPDX-License-Identifier: Apache-2.0
// Tensor maps for TMA, made on the host and passed to kernels by value.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace twell::gpu {

// A row-major bf16 matrix [rows, cols] read in boxes of box_rows x 64 columns (128 bytes), stored
// in shared memory with the 128-byte swizzle WGMMA reads. Elements outside the matrix read as 0.
// matrix is 16-byte aligned, cols a multiple of 8, box_rows at most 256. Throws Error.
CUtensorMap matrix_tensor_map(const void* matrix, int64_t rows, int64_t cols, int32_t box_rows);

// The same of bytes, in boxes of 128 columns; cols is a multiple of 16.
CUtensorMap byte_matrix_tensor_map(const void* matrix, int64_t rows, int64_t cols,
                                   int32_t box_rows);

}  // namespace twell::gpu
