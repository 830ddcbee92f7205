// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on the GPU (see rope.h for the convention and the tables), on the rows
// [q | k | v] of a fused projection. It also adds the projection's biases and can write keys and
// values into a cache.
//   qkv [M, (H + 2 H_kv) * hd] bf16: queries are rotated in place; keys too, or into the cache.
// inverse rotates back, in place: the backward pass, on [d_q | d_k | d_v], without bias and cache.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct RopeCuda {
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;                 // even
  const float* cos = nullptr;           // [max_positions, hd / 2]
  const float* sin = nullptr;           // [max_positions, hd / 2]
  const int32_t* positions = nullptr;   // [M] in [0, max_positions), checked by the caller
  const __nv_bfloat16* bias = nullptr;  // [(H + 2 H_kv) * hd] or null
  __nv_bfloat16* qkv = nullptr;         // [M, (H + 2 H_kv) * hd]
  // With a cache, keys and values of token m become its row cache_rows[m]; without one, both null.
  __nv_bfloat16* keys = nullptr;        // [rows, H_kv * hd]
  __nv_bfloat16* values = nullptr;      // [rows, H_kv * hd]
  const int64_t* cache_rows = nullptr;  // [M]
  bool inverse = false;
};
cudaError_t launch_rope(const RopeCuda& problem, cudaStream_t stream);

}  // namespace twell
