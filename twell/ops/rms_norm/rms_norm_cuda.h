// SPDX-License-Identifier: Apache-2.0
// RMSNorm on the GPU, forward and backward (rms_norm.h), and over the heads of queries and keys.
// bf16, sums in f32. D is a multiple of 8, at most kMaxNormWidth; launches return
// cudaErrorInvalidValue for other widths.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

inline constexpr int64_t kMaxNormWidth = 16384;

// s = x + residual (or x);  y = scale * s * rsqrt(mean(s^2) + eps) * weight
// s is rounded to bf16 before it is normalised, as it is stored.
struct RmsNormCuda {
  int64_t tokens = 0;                       // M
  int64_t width = 0;                        // D
  const __nv_bfloat16* x = nullptr;         // [M, D]
  const __nv_bfloat16* residual = nullptr;  // [M, D] or null
  __nv_bfloat16* sum = nullptr;             // [M, D] s; needed with a residual, may be either input
  const __nv_bfloat16* weight = nullptr;    // [D]
  __nv_bfloat16* y = nullptr;               // [M, D], may be x when there is no residual
  float eps = 1e-5f;
  float scale = 1.0f;
  // Where another order of tokens is in use, the row of each token [M] there; null: its own.
  const int32_t* residual_rows = nullptr;
  const int32_t* y_rows = nullptr;  // y is not x then
};
cudaError_t launch_rms_norm(const RmsNormCuda& problem, cudaStream_t stream);

// The same with y in 8 bits, a scale per token (format/byte_matrix.h), quantised from its bf16
// values. `norm` has no y; its y_rows are rows of `values` and `scales`.
struct RmsNormBytesCuda {
  RmsNormCuda norm;           // D a multiple of 16
  uint8_t* values = nullptr;  // [M, D] e4m3
  float* scales = nullptr;    // [M]
};
cudaError_t launch_rms_norm_bytes(const RmsNormBytesCuda& problem, cudaStream_t stream);

// d_s = d_residual + gradient through the norm;  d_weight += sum over tokens of d_y * s / rms
// 1 / rms is recomputed from s, which is read anyway. The order of additions depends only on M and
// D.
struct RmsNormBackwardCuda {
  int64_t tokens = 0;                         // M
  int64_t width = 0;                          // D
  const __nv_bfloat16* s = nullptr;           // [M, D] input of the norm
  const __nv_bfloat16* weight = nullptr;      // [D]
  const __nv_bfloat16* d_y = nullptr;         // [M, D]
  const __nv_bfloat16* d_residual = nullptr;  // [M, D], or null: none
  __nv_bfloat16* d_s = nullptr;               // [M, D] out, may be d_residual or d_y
  float* d_weight = nullptr;                  // [D] accumulated
  float* partial = nullptr;                   // [rms_norm_backward_partials(M), D] workspace
  float eps = 1e-5f;
  float scale = 1.0f;  // of the forward
  // The row of each token [M] in d_y and in a second copy of d_s; null: its own. With d_y_rows, d_s
  // is not d_y.
  const int32_t* d_y_rows = nullptr;
  const int32_t* copy_rows = nullptr;
  __nv_bfloat16* d_s_copy = nullptr;  // [M, D] or null: none
};
// Rows of partial sums for the weight's gradient, enough for fewer tokens too.
int64_t rms_norm_backward_partials(int64_t tokens);
cudaError_t launch_rms_norm_backward(const RmsNormBackwardCuda& problem, cudaStream_t stream);

// RMSNorm of each head of queries and keys, before the rotation (Qwen3), in place on the rows [q |
// k | v] of a fused projection, whose biases are added first.
struct HeadNormCuda {
  int64_t tokens = 0;                     // M
  int64_t heads = 0;                      // H, of queries
  int64_t kv_heads = 0;                   // H_kv
  int64_t head_dim = 0;                   // a multiple of 8, at most 256
  const __nv_bfloat16* bias = nullptr;    // [(H + 2 H_kv) * hd] or null
  const __nv_bfloat16* q_norm = nullptr;  // [hd]
  const __nv_bfloat16* k_norm = nullptr;  // [hd]
  __nv_bfloat16* qkv = nullptr;           // [M, (H + 2 H_kv) * hd], in place; v only gets its bias
  float eps = 1e-5f;
  __nv_bfloat16* kept = nullptr;  // [M, (H + H_kv) * hd] out: what is normalised; or null
};
// cudaErrorInvalidValue if the head size is not supported.
cudaError_t launch_head_norm(const HeadNormCuda& problem, cudaStream_t stream);

// Its gradient, in place. 1 / rms is recomputed from what the forward pass kept. The order of
// additions depends only on the shape.
struct HeadNormBackwardCuda {
  int64_t tokens = 0;                     // M
  int64_t heads = 0;                      // H
  int64_t kv_heads = 0;                   // H_kv
  int64_t head_dim = 0;                   // hd, a multiple of 8, at most 256
  const __nv_bfloat16* kept = nullptr;    // [M, (H + H_kv) * hd]
  const __nv_bfloat16* q_norm = nullptr;  // [hd]
  const __nv_bfloat16* k_norm = nullptr;  // [hd]
  __nv_bfloat16* d_qkv = nullptr;         // [M, (H + 2 H_kv) * hd], in place; v stays
  float* d_q_norm = nullptr;              // [hd] accumulated
  float* d_k_norm = nullptr;              // [hd] accumulated
  float* partial = nullptr;               // [2, head_norm_backward_partials(M), hd] workspace
  float eps = 1e-5f;
};
int64_t head_norm_backward_partials(int64_t tokens);
// cudaErrorInvalidValue if the head size is not supported.
cudaError_t launch_head_norm_backward(const HeadNormBackwardCuda& problem, cudaStream_t stream);

}  // namespace twell
