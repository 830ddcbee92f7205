// SPDX-License-Identifier: Apache-2.0
// The dense feed-forward layer on the GPU with x and weights in e4m3 (format/byte_matrix.h), a
// scale per token and per output, through cuBLASLt:
//   g = x w_gate^T,  u = x w_up^T, both in bf16;  h = f(g) * u, or f(u) without a gate, quantised
//   per token in the pass that computes it;  y = h w_down^T
// Which neurons fire is decided by g. The sparse execution, tile-union, computes the same g and u
// on active neurons alone, and quantises h per token and at most 192 neurons of a union, with a
// power of two as its scale (tile_union/byte_down_sm90.cu). Without a gate it keeps h in bf16, and
// widens w_down before each call.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/format/activation.h"
#include "twell/format/activity_cuda.h"
#include "twell/format/byte_matrix_cuda.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct ByteDenseFfnCuda {
  int64_t tokens = 0;  // M
  int64_t rows = 0;    // of all matrices of tokens, at least M; those past M hold anything
  int64_t width = 0;   // D, a multiple of 16
  int64_t ffn = 0;     // F, a multiple of 16, at most kMaxByteFfn
  Activation activation = Activation::kRelu;
  float threshold = 0.0f;            // of FATReLU
  ByteRowsCuda x;                    // [rows, D]
  ByteRowsCuda gate;                 // [F, D], empty without a gate
  ByteRowsCuda up;                   // [F, D]
  ByteRowsCuda down;                 // [D, F]
  __nv_bfloat16* y = nullptr;        // [rows, D]
  bool add = false;                  // y += instead of =
  int32_t* row_nnz = nullptr;        // [M] out: active neurons of each token, or null
  ActivityCuda* activity = nullptr;  // added to, or null
  __nv_bfloat16* first = nullptr;    // [rows, F] workspace
  __nv_bfloat16* second = nullptr;   // [rows, F] workspace, not needed without a gate
  float* hidden_scales = nullptr;    // [rows] workspace
};
inline constexpr int64_t kMaxByteFfn = 98304;  // a row of h in bf16 fits into shared memory

// Enqueues; the first call of a number of rows makes plans.
void byte_dense_ffn_cuda(CudaContext& ctx, const ByteDenseFfnCuda& problem);

}  // namespace twell
