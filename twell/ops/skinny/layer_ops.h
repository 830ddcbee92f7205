// SPDX-License-Identifier: Apache-2.0
// Products of 1 to 8 tokens with the weights of a layer (decoding). Each is one kernel with what
// stands before and after it:
//   linear    y = n(x) w^T [+ residual]
//   qkv       q, k, v = n(x) w^T [+ bias]; q and k rotated; k and v stored in the cache
//   gate_up   h = relu(n(x) w_gate^T) * (n(x) w_up^T), or relu(n(x) w_up^T) without a gate
// where n(x) is x, or the RMS norm of x rounded to bf16. bf16 with f32 accumulation. The problems
// are also those of batch_ops.h, which takes more tokens and no norm.
//
// All are bound by reading the weights once. They are launched with programmatic dependent launch;
// before they wait for the previous kernel they read weights only, and these only if declared
// constant. The result for a token does not depend on the tokens beside it. Deterministic; never
// synchronise; return cudaErrorInvalidValue for shapes outside the ranges below.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"
#include "twell/format/byte_matrix_cuda.h"
#include "twell/ops/skinny/row_tokens.h"

namespace twell::layer_ops {

// How many tokens of this width the current device takes at once: kMaxTokens, or fewer where rows
// are too wide for shared memory.
int64_t max_tokens(int64_t width);

// Device memory throughout; matrices contiguous row-major, 16-byte aligned.
struct Input {
  int64_t tokens = 0;                   // M
  int64_t width = 0;                    // D, a multiple of 8
  const __nv_bfloat16* x = nullptr;     // [M, D]
  const __nv_bfloat16* norm = nullptr;  // [D] weight of the norm, or null: none
  float eps = 1e-5f;
  // True if nothing enqueued earlier on the stream writes the weights.
  bool constant_weights = false;
  // x [M, D] in e4m3, in place of that in bf16, with weights in e4m3 (their *_bytes); batch_ops.h
  // alone, D a multiple of 16.
  ByteRowsCuda x_bytes;
};

struct Linear {
  Input input;
  int64_t cols = 0;                         // N
  const __nv_bfloat16* w = nullptr;         // [N, D]
  const __nv_bfloat16* residual = nullptr;  // [M, N], may be y; or null
  void* y = nullptr;                        // [M, N] bf16, or f32
  bool f32_out = false;
  ByteRowsCuda w_bytes;  // [N, D]
};
cudaError_t launch_linear(const Linear& problem, cudaStream_t stream);

struct Qkv {
  Input input;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;                 // a multiple of 16
  const __nv_bfloat16* w = nullptr;     // [(H + 2 H_kv) * hd, D]
  const __nv_bfloat16* bias = nullptr;  // [(H + 2 H_kv) * hd] or null
  const float* cos = nullptr;           // [max_positions, hd / 2]
  const float* sin = nullptr;           // [max_positions, hd / 2]
  const int32_t* positions = nullptr;   // [M]
  const int64_t* cache_rows = nullptr;  // [M]
  __nv_bfloat16* q = nullptr;           // rows of H * hd, q_stride apart
  int64_t q_stride = 0;
  __nv_bfloat16* keys = nullptr;    // [rows, H_kv * hd]; token m goes to row cache_rows[m]
  __nv_bfloat16* values = nullptr;  // [rows, H_kv * hd]
  ByteRowsCuda w_bytes;             // [(H + 2 H_kv) * hd, D]
};
cudaError_t launch_qkv(const Qkv& problem, cudaStream_t stream);

struct GateUp {
  Input input;
  int64_t ffn = 0;                        // F, a multiple of 8
  const __nv_bfloat16* w_gate = nullptr;  // [F, D], or null: no gate
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  __nv_bfloat16* h = nullptr;             // [M, F]
  bool squared = false;                   // relu2 instead of ReLU
  bool up_relu = false;                   // dReLU: the ReLU of x w_up^T too
  float threshold = 0.0f;                 // of FATReLU, which compares g rounded to bf16
  ActivityCuda* activity = nullptr;       // tokens and nnz are added; may be null
  ByteRowsCuda gate_bytes, up_bytes;      // [F, D]; the former empty without a gate
};
cudaError_t launch_gate_up(const GateUp& problem, cudaStream_t stream);

}  // namespace twell::layer_ops
