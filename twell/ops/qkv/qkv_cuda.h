// SPDX-License-Identifier: Apache-2.0
// Query, key and value projection of many tokens on a Hopper GPU, with the rotation in its
// epilogue: no pass over q and k of its own.
//   [q | k | v] = x w^T, rounded to bf16; then q and k rotated as launch_rope does, in place or
//   into a cache
// Same bits as linear_cuda and launch_rope but for the order of the sums in the product.
// Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/ops/rope/rope_cuda.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct QkvCuda {
  int64_t width = 0;                 // D
  const __nv_bfloat16* x = nullptr;  // [M, D]
  const __nv_bfloat16* w = nullptr;  // [(H + 2 H_kv) * hd, D]
  RopeCuda rope;                     // of M tokens; qkv is written, but not where a cache takes it
};

// Whether qkv_cuda takes the problem, and is worth it: many tokens on Hopper, heads of 64 or 128,
// no bias, D a multiple of 8.
bool qkv_is_fused(const CudaContext& ctx, const QkvCuda& problem);

// Throws Error where it does not.
void qkv_cuda(CudaContext& ctx, const QkvCuda& problem);

}  // namespace twell
