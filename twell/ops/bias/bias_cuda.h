// SPDX-License-Identifier: Apache-2.0
// The bias of a linear layer on the GPU.
//   forward    x += bias on every row, added in f32; x [M, N] bf16, bias [N] bf16
//   backward   d_bias += sum of the rows of d_y, in an order that depends on the shape alone;
//              d_y [M, N] bf16, d_bias [N] f32
// Rows and vectors have N rounded up to a multiple of 8 places. What is in those behind N does not
// matter; forward changes them in x, backward adds 0 to them in d_bias.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

struct BiasForwardCuda {
  int64_t tokens = 0;                   // M
  int64_t width = 0;                    // N
  const __nv_bfloat16* bias = nullptr;  // [N]
  __nv_bfloat16* x = nullptr;           // [M, N] in and out
};
cudaError_t launch_bias_forward(const BiasForwardCuda& problem, cudaStream_t stream);

struct BiasBackwardCuda {
  int64_t tokens = 0;                  // M
  int64_t width = 0;                   // N
  const __nv_bfloat16* d_y = nullptr;  // [M, N]
  float* d_bias = nullptr;             // [N] accumulated
  float* partial = nullptr;            // [bias_backward_partials(M), N] workspace
};
int64_t bias_backward_partials(int64_t tokens);
cudaError_t launch_bias_backward(const BiasBackwardCuda& problem, cudaStream_t stream);

}  // namespace twell
