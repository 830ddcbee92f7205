// SPDX-License-Identifier: Apache-2.0
// Row-fused execution of what follows the gate, on the GPU, bf16 with f32 accumulation: token by
// token, dot product with a neuron's row of w_up, times g, times its row of w_down into y. h is
// rounded to bf16 but stays in registers. Best where few neurons fire per token and neighbouring
// tokens share none. Runs on any GPU of compute capability 8.0 or later.
// Rows with more than 64 non-zeros are set apart and spread over many warps.
// Exact on every input, spilled tiles included. Deterministic: partial sums of a row are added in
// an order that depends on the number of heavy rows alone. Never synchronises; can be captured in a
// CUDA graph.
#pragma once

#include "twell/ops/ffn/sparse_up_down_cuda.h"

namespace twell {

// Device memory of one row-fused call in flight, for up to max_tokens tokens of up to max_width.
class RowFusedWorkspace {
 public:
  // Synchronises once, to clear its counters.
  RowFusedWorkspace(CudaContext& ctx, int64_t max_tokens, int64_t max_width);

  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_width() const { return max_width_; }
  int64_t bytes() const { return heavy_rows_.bytes() + counters_.bytes() + partials_.bytes(); }

 private:
  friend void row_fused_up_down_cuda(CudaContext&, const SparseUpDownCuda&, RowFusedWorkspace&);
  int64_t max_tokens_;
  int64_t max_width_;
  DeviceBuffer<int32_t> heavy_rows_;  // [M]
  DeviceBuffer<int32_t> counters_;    // heavy rows, CTAs done, parts done of each split row
  DeviceBuffer<float> partials_;      // [parts of split rows, D]
};

// Why the problem cannot run on this context's device; empty when it can.
std::string row_fused_unsupported(const CudaContext& ctx, const SparseUpDownCuda& problem);

// Throws Error where unsupported, or larger than the workspace.
void row_fused_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                            RowFusedWorkspace& workspace);

}  // namespace twell
