// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/ops/ffn/ffn_call_cuda.h"
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"

namespace twell {
namespace {

// One chunk of so many behind a screen is checked, on so many of its tokens, so that checks take a
// small part of the time.
constexpr int64_t kScreenCheck = 64;
constexpr int64_t kCheckedTokens = 128;

// Compares the candidates of a few tokens, other ones each time, with the gate GEMM's result.
void check_screen(const FfnCallCuda& call) {
  FfnBuffersCuda& buffers = call.buffers;
  const FfnForwardCuda& problem = call.problem;
  const int64_t most = std::min<int64_t>(kCheckedTokens, problem.tokens / 2);
  const int64_t checks = call.plan.screened_calls / kScreenCheck;
  const int64_t begin = checks * kCheckedTokens % (problem.tokens - most);
  const TwellShape shape = ffn_twell_shape(most, call.ffn());
  // The gate's memory, of [chunk, F] values, is free: first the spill slots, then the words.
  const int64_t spills = shape.max_spill_slots() * kTwellTile;
  const TwellPacked gate{.shape = shape,
                         .words = reinterpret_cast<uint32_t*>(buffers.gate.data() + spills),
                         .spill = reinterpret_cast<BF16*>(buffers.gate.data()),
                         .spill_slots = shape.max_spill_slots(),
                         .row_nnz = buffers.row_nnz.data()};
  gate_gemm_cuda(call.ctx, {.tokens = most,
                            .width = call.width(),
                            .ffn = call.ffn(),
                            .x = problem.x + begin * call.width(),
                            .w_gate = problem.weights.w_gate,
                            .out = gate,
                            .cut = call.cut()});
  TWELL_CUDA_CHECK(launch_check_screen(gate, buffers.words.data() + begin * shape.tiles() * 8,
                                       call.plan.counts, call.ctx.stream()));
}

}  // namespace

// Candidates lie where other executions have TwELL's words, of which they need a quarter.
void launch_screened(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  FfnBuffersCuda& buffers = call.buffers;
  screened_ffn_cuda(call.ctx,
                    {.tokens = problem.tokens,
                     .width = call.width(),
                     .ffn = call.ffn(),
                     .rotated = problem.rotated,
                     .screen = problem.weights.screen,
                     .x = problem.x,
                     .w_gate = problem.weights.w_gate,
                     .w_up = problem.weights.w_up,
                     .w_down = problem.weights.w_down,
                     .y = problem.y,
                     .add = problem.add,
                     .squared = call.squared(),
                     .up_relu = call.up_relu(),
                     .cut = call.cut(),
                     .y_rows = problem.y_rows,
                     .candidates = {buffers.words.data(), buffers.row_nnz.data()},
                     .row_nnz = problem.row_nnz,
                     .activity = call.plan.counts},
                    buffers.tile_union);
  const bool due = call.plan.screened_calls++ % kScreenCheck == 0;
  if (due && call.plan.counts != nullptr) check_screen(call);
}

}  // namespace twell
