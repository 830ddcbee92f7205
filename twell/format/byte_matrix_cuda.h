// SPDX-License-Identifier: Apache-2.0
// byte_matrix.h on the GPU: quantises rows of bf16, and widens them again. Values that are not
// finite are not refused here, because activations may hold them: their row becomes NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/byte_matrix.h"

namespace twell {

// Device memory: e4m3 or int8 values packed row-major, 16-byte aligned, and a scale per row.
struct ByteRowsCuda {
  const uint8_t* values = nullptr;  // [rows, cols]
  const float* scales = nullptr;    // [rows]
  bool empty() const { return values == nullptr; }
};

// The value with the specification's rounding; scaled: at most `most` in size, or NaN.
struct QuantiseRowsCuda {
  ByteType type = ByteType::kE4M3;
  int64_t rows = 0;
  int64_t cols = 0;                  // a multiple of 16
  const __nv_bfloat16* x = nullptr;  // [rows, cols], 16-byte aligned
  uint8_t* values = nullptr;         // [rows, cols] out
  float* scales = nullptr;           // [rows] out
};
// cudaErrorInvalidValue for other numbers of columns.
cudaError_t launch_quantise_rows(const QuantiseRowsCuda& problem, cudaStream_t stream);

// out = the values, which bf16 holds exactly, without their scales; or times their scales, rounded.
struct WidenRowsCuda {
  ByteType type = ByteType::kE4M3;
  int64_t rows = 0;
  int64_t cols = 0;         // a multiple of 16
  ByteRowsCuda x;           // scales null: none are applied
  bool transposed = false;  // out is [cols, rows]; rows is a multiple of 16 then too
  __nv_bfloat16* out = nullptr;
};
cudaError_t launch_widen_rows(const WidenRowsCuda& problem, cudaStream_t stream);

// out [cols, rows] = x [rows, cols]^T.
cudaError_t launch_transpose(const __nv_bfloat16* x, int64_t rows, int64_t cols, __nv_bfloat16* out,
                             cudaStream_t stream);
cudaError_t launch_transpose_bytes(const uint8_t* x, int64_t rows, int64_t cols, uint8_t* out,
                                   cudaStream_t stream);

}  // namespace twell
