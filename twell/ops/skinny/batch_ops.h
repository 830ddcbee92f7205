// SPDX-License-Identifier: Apache-2.0
// The products of layer_ops.h for up to 64 tokens on Hopper (decoding many sequences), and
//   down      y = h w_down [+ residual]
// Their input has no norm; only results are rounded to bf16. All else is as said there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/ops/skinny/layer_ops.h"

namespace twell::batch_ops {

inline constexpr int64_t kMaxTokens = 64;

using layer_ops::GateUp;
using layer_ops::Input;
using layer_ops::Linear;
using layer_ops::Qkv;

cudaError_t launch_linear(const Linear& problem, cudaStream_t stream);  // cols a multiple of 8

// y = h w, a weight with a row for each value of the input.
struct Down {
  Input input;                              // x is h [M, F], width F
  int64_t cols = 0;                         // D, a multiple of 8
  const __nv_bfloat16* w = nullptr;         // [F, D]
  const __nv_bfloat16* residual = nullptr;  // [M, D], may be y; or null
  __nv_bfloat16* y = nullptr;               // [M, D]
};
cudaError_t launch_down(const Down& problem, cudaStream_t stream);

bool takes(const Qkv& problem);  // whether head_dim is a multiple of 64, and the input suits
cudaError_t launch_qkv(const Qkv& problem, cudaStream_t stream);

cudaError_t launch_gate_up(const GateUp& problem, cudaStream_t stream);

}  // namespace twell::batch_ops
