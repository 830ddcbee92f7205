// SPDX-License-Identifier: Apache-2.0
// Query, key and value projection of many tokens on a Hopper GPU. The GEMM's epilogue rotates q and
// k, so that they need no pass of their own:
//   [q | k | v] = x w^T, rounded to bf16; then q and k rotated as by launch_rope, in place or into
//   a cache
// The result is that of linear_cuda and launch_rope, apart from the order of the product's sums.
// Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {

class CudaContext;

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct QkvCuda {
  int64_t width = 0;                 // D
  const __nv_bfloat16* x = nullptr;  // [M, D]
  const __nv_bfloat16* w = nullptr;  // [(H + 2 H_kv) * hd, D]
  RopeCuda rope;                     // of M tokens; qkv gets what does not go to a cache
  // x and w in e4m3, in place of those in bf16; D is a multiple of 16.
  ByteRowsCuda x_bytes, w_bytes;
  bool in_bytes() const { return !x_bytes.empty(); }
};

// Whether qkv_cuda takes the problem and is faster than separate steps: many tokens
// (route::fused_qkv_pays) on Hopper, heads of 64 or 128, no bias, no inverse rotation, D a multiple
// of 8.
bool qkv_is_fused(const CudaContext& ctx, const QkvCuda& problem);

// Throws Error for problems it does not take, but takes any number of tokens.
void qkv_cuda(CudaContext& ctx, const QkvCuda& problem);

}  // namespace twell
