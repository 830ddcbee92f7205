// SPDX-License-Identifier: Apache-2.0
// RMSNorm over each head of queries and keys on the GPU, in front of the rotation (Qwen3), in place
// on the rows [q | k | v] of a fused projection, whose biases are added first. bf16, sums in f32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct HeadNormCuda {
  int64_t tokens = 0;                     // M
  int64_t heads = 0;                      // H, of queries
  int64_t kv_heads = 0;                   // H_kv
  int64_t head_dim = 0;                   // a multiple of 8, at most 256
  const __nv_bfloat16* bias = nullptr;    // [(H + 2 H_kv) * hd] or null
  const __nv_bfloat16* q_norm = nullptr;  // [hd]
  const __nv_bfloat16* k_norm = nullptr;  // [hd]
  __nv_bfloat16* qkv = nullptr;           // [M, (H + 2 H_kv) * hd], in place; of v only the bias
  float eps = 1e-5f;
};
// cudaErrorInvalidValue for a head size that is not supported.
cudaError_t launch_head_norm(const HeadNormCuda& problem, cudaStream_t stream);

}  // namespace twell
