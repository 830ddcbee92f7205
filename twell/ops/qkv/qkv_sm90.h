// SPDX-License-Identifier: Apache-2.0
// Launch of the fused projection: what the host side passes to the kernel.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/matmul/paired_gemm_sm90.h"

namespace twell::qkv {

inline constexpr int kStoredRows = 16;  // of a box of qkv_map

struct Target {
  CUtensorMap qkv_map;        // of qkv
  const float2* cos;          // [positions, hd / 4] pairs of neighbouring columns
  const float2* sin;          // the same
  const int32_t* positions;   // [M]
  const int64_t* cache_rows;  // [M], or null: no cache
  __nv_bfloat16* qkv;         // [M, columns]
  __nv_bfloat16* keys;        // [rows, kv_columns]
  __nv_bfloat16* values;      // [rows, kv_columns]
  int tokens;                 // M
  int q_columns;              // H * hd
  int kv_columns;             // H_kv * hd

  __host__ __device__ int columns() const { return q_columns + 2 * kv_columns; }
};

// head_dim 64 or 128; ctas is a multiple of paired_gemm::kCluster.
cudaError_t launch_qkv_sm90(const paired_gemm::Operands& operands, const Target& target,
                            int head_dim, int ctas, cudaStream_t stream);

}  // namespace twell::qkv
