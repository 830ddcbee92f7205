// SPDX-License-Identifier: Apache-2.0
// Up and down on packed gates, on the GPU, bf16 with f32 accumulation, in two executions:
//   gated:      h = g * (x w_up^T) on the active neurons, y = h w_down
//   non-gated:  y = h w_down, h being the packed activations themselves
// Tile-union (Hopper) cuts the tokens into tiles of 128. The union of a tile's active neurons is
// compacted, and its weight rows are gathered into two small dense GEMMs on the tensor cores. Heavy
// rows, far above the mean (the first tokens of a sequence), would swell the union of every tile
// they are in, so they get tiles of their own. A tile whose union is all of F costs what the dense
// layer costs.
// Row-fused works token by token: dot product of x with a neuron's row of w_up, times g, times its
// row of w_down, added to y. It runs on any GPU of compute capability 8.0 or later, and is best
// where few neurons are active per token and neighbouring tokens share none.
// Both are exact on every input and deterministic, never synchronise, and can be captured in a CUDA
// graph.
#pragma once

#include <cuda_bf16.h>

#include <string>

#include "twell/base/cuda.h"
#include "twell/format/activity_cuda.h"
#include "twell/format/twell.h"
#include "twell/ops/ffn/hopper/gate_gemm_sm90.h"

namespace twell {

// All pointers are device memory, matrices contiguous row-major, 16-byte aligned.
struct SparseUpDownCuda {
  int64_t tokens = 0;                     // M
  int64_t width = 0;                      // D, a multiple of 8
  int64_t ffn = 0;                        // F, a multiple of 8
  TwellPacked gate;                       // [M, F], T = 256, any order within a tile; row_nnz set
  const __nv_bfloat16* x = nullptr;       // [M, D]; not read without a gate
  const __nv_bfloat16* w_up = nullptr;    // [F, D], or null: no gate
  const __nv_bfloat16* w_down = nullptr;  // [F, D]
  __nv_bfloat16* y = nullptr;             // [M, D], every element written; overlaps nothing
  bool add = false;                       // y += instead of =
  ActivityCuda* activity = nullptr;       // added to; may be null
  // The gate comes from a gate GEMM of these sizes, directly before on this stream, which was given
  // the workspace's progress(tokens). Then this call starts while the gate GEMM runs. Gated only.
  bool follows_gate = false;
};

// Device memory of one tile-union call in flight, for up to max_tokens tokens. The largest part is
// the compacted activations, which in the worst case are 4/3 of a dense [M, F].
class TileUnionWorkspace {
 public:
  TileUnionWorkspace(int64_t max_tokens, int64_t ffn);

  static int64_t max_tiles(int64_t tokens);
  static int64_t bytes_needed(int64_t max_tokens, int64_t ffn);  // what bytes() will be
  int64_t max_tokens() const { return max_tokens_; }
  int64_t ffn() const { return ffn_; }
  int64_t bytes() const;
  // For GateGemmCuda::progress of the gate GEMM that a call of so many tokens follows.
  GateProgress progress(int64_t tokens) const;
  // Memory for at least [max_tokens, ffn] values that is free between calls.
  __nv_bfloat16* values() const { return activations_.data(); }

 private:
  friend void tile_union_up_down_cuda(CudaContext&, const SparseUpDownCuda&, TileUnionWorkspace&);
  int64_t max_tokens_;
  int64_t ffn_;
  DeviceBuffer<int32_t> tile_tokens_;        // [tiles, 128]
  DeviceBuffer<uint32_t> mask_;              // [tiles, F / 256 rounded up * 8]
  DeviceBuffer<int32_t> union_size_;         // [tiles]
  DeviceBuffer<uint32_t> before_;            // like mask_: neurons of the union below
  DeviceBuffer<int32_t> first_block_;        // [tiles]
  DeviceBuffer<uint4> heavy_;                // [tiles] a bit per row
  DeviceBuffer<int32_t> progress_;           // everything that must be 0 at the start of a call
  DeviceBuffer<uint32_t> entries_;           // [tiles, F / 256 rounded up, 2048]
  DeviceBuffer<int32_t> listed_;             // [tiles, F / 256 rounded up]
  DeviceBuffer<int32_t> union_ids_;          // [tiles, F rounded up to 64]
  DeviceBuffer<__nv_bfloat16> activations_;  // [tiles, F / 64 rounded up, 128, 64] swizzled
  DeviceBuffer<int32_t> tile_order_;         // [tiles]
};

// Why the problem cannot run on this context's device; empty when it can.
std::string tile_union_unsupported(const CudaContext& ctx, const SparseUpDownCuda& problem);

// Throws Error where unsupported, or larger than the workspace.
void tile_union_up_down_cuda(CudaContext& ctx, const SparseUpDownCuda& problem,
                             TileUnionWorkspace& workspace);

// h is rounded to bf16 but stays in registers. Rows with more than 64 non-zeros are spread over
// many warps; partial sums of a row are added in an order that depends on the number of such rows
// alone.

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
