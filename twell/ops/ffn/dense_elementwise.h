// SPDX-License-Identifier: Apache-2.0
// The elementwise steps of a dense layer on the GPU, which also count active neurons.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activation.h"
#include "twell/format/activity_cuda.h"

namespace twell {

// After ReLU in the GEMM's epilogue: u = g * u.
struct GateMultiply {
  __nv_bfloat16* u = nullptr;        // [M, F] in and out: u = g * u; null: only count
  const __nv_bfloat16* g = nullptr;  // [M, F], 0 where a neuron does not fire
  int64_t tokens = 0;                // M
  int64_t ffn = 0;                   // F, a multiple of 8
  int32_t* row_nnz = nullptr;        // [M] out, or null
  ActivityCuda* counts = nullptr;    // added to, or null
  int64_t stride = 1;                // only every stride-th token is processed
};
cudaError_t launch_gate_multiply(const GateMultiply& problem, cudaStream_t stream);

// The elementwise step of a dense layer whose activation f is not ReLU, on the GPU. f is computed
// in f32, see format/activation.h.
struct ActivateMultiply {
  Activation activation = Activation::kSilu;
  const __nv_bfloat16* g = nullptr;  // [M, F] in front of the activation
  const __nv_bfloat16* u = nullptr;  // [M, F], or null: no gate
  __nv_bfloat16* h = nullptr;        // [M, F] out: f(g) * u, or f(g); may be either input
  int64_t tokens = 0;                // M
  int64_t ffn = 0;                   // F, a multiple of 8
  int32_t* row_nnz = nullptr;        // [M] out: neurons with f(g) != 0, or null
  ActivityCuda* counts = nullptr;    // added to, or null
};
cudaError_t launch_activate_multiply(const ActivateMultiply& problem, cudaStream_t stream);

}  // namespace twell
