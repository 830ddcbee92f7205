// SPDX-License-Identifier: Apache-2.0
// The example of docs/first_kernel.md: a sparse execution of the feed-forward layer that reads well
// and runs slowly. A CTA computes a token:
//   g = relu(x w_gate^T); h = g * (x w_up^T) where g is active; y = h w_down
// bf16 with f32 accumulation; g and h are rounded to bf16. A NaN in the gate counts as active.
// Exact on every input, deterministic, never synchronises. Error where the sizes do not suit.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/registry.h"

namespace twell::first_kernel {

// A token's x and h lie in 48 KiB of shared memory as f32.
inline constexpr int64_t kMostWidth = 4096, kMostFfn = 8192;

// Device memory, matrices contiguous row-major, 16-byte aligned.
struct NaiveFfnCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8, up to kMostWidth
  int64_t ffn = 0;                        // F, a multiple of 8, up to kMostFfn
  const __nv_bfloat16* x = nullptr;       // [M, D]
  const __nv_bfloat16* w_gate = nullptr;  // [F, D]
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written
  bool add = false;                       // y += instead of =
  ActivityCuda* activity = nullptr;       // tokens and nnz are added; may be null
};
void naive_ffn_cuda(CudaContext& ctx, const NaiveFfnCuda& problem);

// What registry.cc would say of it. In the engine a cost stands in ops/ffn/costs.cc, and the launch
// in the room's launch_cuda.cc.
double naive_cost(const GpuFfnLayer& layer, int64_t tokens, const LayerActivity& activity);
void launch_naive(const FfnCallCuda& call);
GpuFfnExecution naive_execution();

}  // namespace twell::first_kernel
