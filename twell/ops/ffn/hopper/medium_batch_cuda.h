// SPDX-License-Identifier: Apache-2.0
// Host side of medium batches (65 to some thousand tokens) on Hopper, bf16 with f32 accumulation:
//   gated:      g = relu(x w_gate^T), h = f(g) * (x w_up^T), y = h w_down
//   non-gated:  h = f(relu(x w_up^T)), y = h w_down
// f(g) is g, or g^2 for relu2. Up and down run on the union of the active neurons of a tile of 128
// tokens, like tile-union, but every kernel is cut into as many pieces as the device has SMs, also
// where there are few tiles.
// Exact on every input: with every neuron active it computes what the dense layer computes. g is
// rounded to bf16; h is rounded once, after the product in f32. A NaN in the gate counts as active.
// Deterministic. Never synchronises; can be captured in a CUDA graph.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <string>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/ops/ffn/sparse_up_down_cuda.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct MediumBatchFfnCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  const __nv_bfloat16* x = nullptr;       // [M, D]
  const __nv_bfloat16* w_gate = nullptr;  // [F, D], or null: no gate
  const __nv_bfloat16* w_up = nullptr;    // [F, D]
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written; overlaps nothing
  bool add = false;                       // y += instead of =
  bool squared = false;                   // f(g) = g^2
  // Memory for [M rounded up to 128, F rounded up to 16] values that is free between calls.
  __nv_bfloat16* gate = nullptr;
  ActivityCuda* activity = nullptr;  // added to, but for max_row_nnz; may be null
  // The first weight may be read while the predecessor of this call still runs. Only for weights
  // that no earlier work on the stream writes.
  bool weights_are_constant = false;
};

inline constexpr int64_t kMaxMediumFfn = 65536;

// Why the problem cannot run on this context's device; empty when it can.
std::string medium_batch_ffn_unsupported(const CudaContext& ctx, const MediumBatchFfnCuda& problem);

// Throws Error where unsupported, or larger than the workspace.
void medium_batch_ffn_cuda(CudaContext& ctx, const MediumBatchFfnCuda& problem,
                           TileUnionWorkspace& workspace);

}  // namespace twell
