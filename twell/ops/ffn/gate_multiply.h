// SPDX-License-Identifier: Apache-2.0
// The one elementwise step of a dense layer on the GPU, which also counts what fires.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "twell/format/activity_cuda.h"

namespace twell {

struct GateMultiply {
  __nv_bfloat16* u = nullptr;        // [M, F] in and out: u = g * u; null: only count
  const __nv_bfloat16* g = nullptr;  // [M, F], 0 where a neuron does not fire
  int64_t tokens = 0;                // M
  int64_t ffn = 0;                   // F, a multiple of 8
  int32_t* row_nnz = nullptr;        // [M] out, or null
  ActivityCuda* counts = nullptr;    // added to, or null
  int64_t stride = 1;                // every stride-th token only
};
cudaError_t launch_gate_multiply(const GateMultiply& problem, cudaStream_t stream);

}  // namespace twell
