// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_call_cuda.h"

namespace twell {

// Up starts on tiles that the gate GEMM has packed while the GEMM still runs.
void launch_tile_union(const FfnCallCuda& call) {
  const bool follows = call.gated();
  const FfnWeightsCuda& weights = call.problem.weights;
  const uint8_t* rows = nullptr;
  if (call.problem.in_bytes() && call.gated()) {
    rows = make_down_rows(call);
  } else if (call.problem.in_bytes()) {
    // Without a gate, h is in bf16.
    const bool has_rows = weights.down_rows != nullptr;
    TWELL_CUDA_CHECK(
        launch_widen_rows({.rows = has_rows ? call.ffn() : call.width(),
                           .cols = has_rows ? call.width() : call.ffn(),
                           .x = {has_rows ? weights.down_rows : weights.down_bytes.values, nullptr},
                           .transposed = !has_rows,
                           .out = call.buffers.wide_down()},
                          call.ctx.stream()));
  }
  SparseUpDownCuda problem = packed_gate(
      call, follows ? call.buffers.tile_union.progress(call.problem.tokens) : GateProgress{});
  problem.follows_gate = follows;
  problem.w_down_bytes = rows;
  tile_union_up_down_cuda(call.ctx, problem, call.buffers.tile_union);
}

// On the portable gate GEMM, whatever the GPU.
void launch_portable_union(const FfnCallCuda& call) {
  portable_union_up_down_cuda(call.ctx, packed_gate(call, {}, /*portable=*/true),
                              call.buffers.tile_union);
}

}  // namespace twell
