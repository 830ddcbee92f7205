// SPDX-License-Identifier: Apache-2.0
// Query, key and value projection of many tokens on a Hopper GPU. The GEMM's epilogue rotates q and
// k, so that they need no pass of their own:
//   [q | k | v] = x w^T, rounded to bf16; then q and k rotated as by launch_rope, in place or into
//   a cache
// The result is that of linear_cuda and launch_rope, apart from the order of the product's sums.
// Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/matmul/paired_gemm_sm90.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {

class CudaContext;

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct QkvCuda {
  int64_t width = 0;                 // D
  const __nv_bfloat16* x = nullptr;  // [M, D]
  const __nv_bfloat16* w = nullptr;  // [(H + 2 H_kv) * hd, D]
  RopeCuda rope;                     // of M tokens; qkv gets what does not go to a cache
};

// Whether qkv_cuda takes the problem and is faster than separate steps: at least 1,024 tokens on
// Hopper, heads of 64 or 128, no bias, no inverse rotation, D a multiple of 8.
bool qkv_is_fused(const CudaContext& ctx, const QkvCuda& problem);

// Throws Error for problems it does not take, but takes any number of tokens.
void qkv_cuda(CudaContext& ctx, const QkvCuda& problem);

// --- What qkv_cuda passes to its kernel ---
namespace qkv {

inline constexpr int kStoredRows = 16;  // rows of a box of qkv_map

struct Target {
  CUtensorMap qkv_map;        // of qkv
  const float2* cos;          // [positions, hd / 4] pairs of neighbouring columns
  const float2* sin;          // [positions, hd / 4]
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

// head_dim is 64 or 128, ctas a multiple of paired_gemm::kCluster.
cudaError_t launch_qkv_sm90(const paired_gemm::Operands& operands, const Target& target,
                            int head_dim, int ctas, cudaStream_t stream);

}  // namespace qkv

}  // namespace twell
