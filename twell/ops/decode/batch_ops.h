// SPDX-License-Identifier: Apache-2.0
// Products of up to 64 tokens with the weights of a layer on Hopper (decoding many sequences).
// Each is one kernel with what stands behind it:
//   linear    y = x w^T [+ residual], or relu of it
//   qkv       q, k, v = x w^T [+ bias]; q and k rotated; k and v stored in the cache
//   gate_up   h = relu(x w_gate^T) * (x w_up^T)
//   down      y = h w_down [+ residual]
// bf16 with f32 accumulation; only results are rounded to bf16.
//
// All are bound by reading the weights once. They are launched with programmatic dependent launch;
// before they wait for the previous kernel they read weights only, and these only if declared
// constant. Deterministic; never synchronise; return cudaErrorInvalidValue for shapes outside the
// ranges below.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell::batch_ops {

inline constexpr int64_t kMaxTokens = 64;

// Device memory throughout; matrices contiguous row-major, 16-byte aligned.
struct Input {
  int64_t tokens = 0;                // M, 1 to 64
  int64_t width = 0;                 // K, a multiple of 8
  const __nv_bfloat16* x = nullptr;  // [M, K]
  // True if nothing enqueued earlier on the stream writes the weights.
  bool constant_weights = false;
};

struct Linear {
  Input input;
  int64_t cols = 0;                         // N, a multiple of 8
  const __nv_bfloat16* w = nullptr;         // [N, K]
  const __nv_bfloat16* residual = nullptr;  // [M, N], may be y; or null
  void* y = nullptr;                        // [M, N] bf16, or f32
  bool f32_out = false;
  bool relu = false;
  bool squared = false;              // with relu: the square of it
  ActivityCuda* activity = nullptr;  // tokens and, of y, non-zeros are added; may be null
};
cudaError_t launch_linear(const Linear& problem, cudaStream_t stream);

// y = h w, a weight with a row for each value of the input.
struct Down {
  Input input;                              // x is h [M, F], width F
  int64_t cols = 0;                         // D, a multiple of 8
  const __nv_bfloat16* w = nullptr;         // [F, D]
  const __nv_bfloat16* residual = nullptr;  // [M, D], may be y; or null
  __nv_bfloat16* y = nullptr;               // [M, D]
};
cudaError_t launch_down(const Down& problem, cudaStream_t stream);

struct Qkv {
  Input input;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;                 // a multiple of 64
  const __nv_bfloat16* w = nullptr;     // [(H + 2 H_kv) * hd, K]
  const __nv_bfloat16* bias = nullptr;  // [(H + 2 H_kv) * hd] or null
  const float* cos = nullptr;           // [max_positions, hd / 2]
  const float* sin = nullptr;           // [max_positions, hd / 2]
  const int32_t* positions = nullptr;   // [M]
  const int64_t* cache_rows = nullptr;  // [M]
  __nv_bfloat16* q = nullptr;           // rows of H * hd, q_stride apart
  int64_t q_stride = 0;
  __nv_bfloat16* keys = nullptr;    // [rows, H_kv * hd]; token m goes to row cache_rows[m]
  __nv_bfloat16* values = nullptr;  // [rows, H_kv * hd]
};
bool takes(const Qkv& problem);
cudaError_t launch_qkv(const Qkv& problem, cudaStream_t stream);

struct GateUp {
  Input input;
  int64_t ffn = 0;                        // F, a multiple of 8
  const __nv_bfloat16* w_gate = nullptr;  // [F, K]
  const __nv_bfloat16* w_up = nullptr;    // [F, K]
  __nv_bfloat16* h = nullptr;             // [M, F]
  bool squared = false;                   // relu2 instead of ReLU
  ActivityCuda* activity = nullptr;       // tokens and nnz are added; may be null
};
cudaError_t launch_gate_up(const GateUp& problem, cudaStream_t stream);

}  // namespace twell::batch_ops
