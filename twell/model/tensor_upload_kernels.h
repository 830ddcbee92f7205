// SPDX-License-Identifier: Apache-2.0
// Kernels that convert stored tensors, already in device memory, to bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

enum class StoredFloat { kF32, kF16, kBF16 };

// to[i] = from[i], i < n.
cudaError_t launch_convert(const void* from, StoredFloat type, int64_t n, __nv_bfloat16* to,
                           cudaStream_t stream);
// to[c * to_stride + r] = from[r * cols + c], r < rows, c < cols.
cudaError_t launch_convert_transposed(const void* from, StoredFloat type, int64_t rows,
                                      int64_t cols, __nv_bfloat16* to, int64_t to_stride,
                                      cudaStream_t stream);

}  // namespace twell
