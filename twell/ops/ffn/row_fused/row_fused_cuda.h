// SPDX-License-Identifier: Apache-2.0
// Row-fused: up and down of a packed gate (packed_ffn_cuda.h) token by token, from compute
// capability 8.0 on.
#pragma once

#include <cstdint>

#include "twell/base/cuda.h"
#include "twell/ops/ffn/packed_ffn_cuda.h"

namespace twell {

// Device memory of one row-fused call in flight, for up to max_tokens tokens of up to max_width.
class RowFusedWorkspace {
 public:
  // Synchronises once, to clear its counters.
  RowFusedWorkspace(CudaContext& ctx, int64_t max_tokens, int64_t max_width);

  int64_t bytes() const { return heavy_rows_.bytes() + counters_.bytes() + partials_.bytes(); }

 private:
  friend void row_fused_up_down_cuda(CudaContext&, const SparseUpDownCuda&, RowFusedWorkspace&);
  int64_t max_tokens_;
  int64_t max_width_;
  DeviceBuffer<int32_t> heavy_rows_;  // [M]
  DeviceBuffer<int32_t> counters_;    // heavy rows, CTAs done, parts done of each split row
  DeviceBuffer<float> partials_;      // [parts of split rows, D]
};

void row_fused_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                            RowFusedWorkspace& workspace);

}  // namespace twell
