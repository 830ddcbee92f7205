// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_call_cuda.h"

namespace twell {

TwellShape ffn_twell_shape(int64_t tokens, int64_t ffn) {
  constexpr int32_t kCompression = 8;
  return {.rows = tokens, .cols = ffn, .tile = int32_t{kTwellTile}, .compression = kCompression};
}

BatchFfnCuda batch_ffn(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  return {.tokens = problem.tokens,
          .width = call.width(),
          .ffn = call.ffn(),
          .x = problem.x,
          .w_gate = problem.weights.w_gate,
          .w_up = problem.weights.w_up,
          .w_down = problem.weights.w_down,
          .y = problem.y,
          .norm = problem.norm,
          .eps = problem.eps,
          .add = problem.add,
          .activity = call.plan.counts,
          .squared = call.squared(),
          .up_relu = call.up_relu(),
          .cut = call.cut(),
          .weights_are_constant = true};
}

SparseUpDownCuda packed_gate(const FfnCallCuda& call, const GateProgress& progress, bool portable) {
  FfnBuffersCuda& buffers = call.buffers;
  const FfnForwardCuda& of = call.problem;
  const TwellShape shape = ffn_twell_shape(of.tokens, call.ffn());
  const bool gated_bytes = of.in_bytes() && call.gated();
  const TwellPacked gate{.shape = shape,
                         .words = buffers.words.data(),
                         .spill = reinterpret_cast<BF16*>(buffers.gate.data()),
                         .spill_slots = shape.max_spill_slots(),
                         .row_nnz = of.row_nnz != nullptr ? of.row_nnz : buffers.row_nnz.data()};
  const GateGemmCuda problem{
      .tokens = of.tokens,
      .width = call.width(),
      .ffn = call.ffn(),
      .x = of.x,
      .w_gate = call.gated() ? of.weights.w_gate : of.weights.w_up,
      .out = gate,
      .progress = progress,
      .cut = call.cut(),
      .x_bytes = of.x_bytes,
      .w_gate_bytes = call.gated() ? of.weights.gate_bytes : of.weights.up_bytes};
  if (portable || call.ctx.compute_capability() != 90) {
    gate_gemm_sm80_cuda(call.ctx, problem);
  } else {
    gate_gemm_cuda(call.ctx, problem);
  }
  return {.tokens = of.tokens,
          .width = call.width(),
          .ffn = call.ffn(),
          .gate = gate,
          .x = of.x,
          .w_up = call.gated() ? of.weights.w_up : nullptr,
          .w_down = of.in_bytes() ? buffers.wide_down() : of.weights.w_down,
          .y = of.y,
          .add = of.add,
          .squared = call.squared(),
          .up_relu = call.up_relu(),
          .y_rows = of.y_rows,
          .activity = call.plan.counts,
          .x_bytes = gated_bytes ? of.x_bytes : ByteRowsCuda{},
          .w_up_bytes = gated_bytes ? of.weights.up_bytes : ByteRowsCuda{},
          .y_scales = of.weights.down_bytes.scales};
}

const uint8_t* make_down_rows(const FfnCallCuda& call) {
  const FfnWeightsCuda& weights = call.problem.weights;
  if (weights.down_rows != nullptr) return weights.down_rows;
  uint8_t* const made = call.buffers.w_down.data();
  TWELL_CUDA_CHECK(launch_transpose_bytes(weights.down_bytes.values, call.width(), call.ffn(), made,
                                          call.ctx.stream()));
  return made;
}

}  // namespace twell
