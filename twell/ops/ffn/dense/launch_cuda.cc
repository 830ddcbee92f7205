// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <tuple>

#include "twell/ops/ffn/bytes/byte_ffn_cuda.h"
#include "twell/ops/ffn/ffn_call_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"
#include "twell/ops/skinny/batch_ops.h"
#include "twell/ops/skinny/layer_ops.h"

namespace twell {
namespace {

constexpr size_t kMostPlans = 256;  // of a layer's GEMMs; each takes some KiB and 0.3 ms to make

// Gate and up into buffers.gate.
layer_ops::GateUp gate_up(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  return {.input = {.tokens = problem.tokens,
                    .width = call.width(),
                    .x = problem.x,
                    .norm = problem.norm,
                    .eps = problem.eps,
                    .constant_weights = true},
          .ffn = call.ffn(),
          .w_gate = call.gated() ? problem.weights.w_gate : nullptr,
          .w_up = problem.weights.w_up,
          .h = call.buffers.gate.data(),
          .squared = call.squared(),
          .up_relu = call.up_relu(),
          .threshold = problem.weights.threshold,
          .activity = call.plan.counts};
}

}  // namespace

// Up to 8 tokens: norm, gate and up as one kernel, down by cuBLASLt.
void launch_dense_rows(const FfnCallCuda& call) {
  TWELL_CUDA_CHECK(layer_ops::launch_gate_up(gate_up(call), call.ctx.stream()));
  matmul_cuda(call.ctx,
              {.rows = call.problem.tokens,
               .cols = call.width(),
               .inner = call.ffn(),
               .add = call.problem.add},
              call.buffers.gate.data(), call.problem.weights.w_down, call.problem.y);
}

// 9 to 64 tokens: gate and up as one kernel, down as another.
void launch_dense_batch(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  TWELL_CUDA_CHECK(batch_ops::launch_gate_up(gate_up(call), call.ctx.stream()));
  TWELL_CUDA_CHECK(batch_ops::launch_down({.input = {.tokens = problem.tokens,
                                                     .width = call.ffn(),
                                                     .x = call.buffers.gate.data(),
                                                     .constant_weights = true},
                                           .cols = call.width(),
                                           .w = problem.weights.w_down,
                                           .residual = problem.add ? problem.y : nullptr,
                                           .y = problem.y},
                                          call.ctx.stream()));
}

// Up to 64 tokens in e4m3: gate and up as one kernel, a pass that quantises h, down as another one.
void launch_dense_few_bytes(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  FfnBuffersCuda& buffers = call.buffers;
  __nv_bfloat16* const h = buffers.gate.data();
  auto* const bytes = reinterpret_cast<uint8_t*>(buffers.tile_union.values());
  TWELL_CUDA_CHECK(batch_ops::launch_gate_up({.input = {.tokens = problem.tokens,
                                                        .width = call.width(),
                                                        .constant_weights = true,
                                                        .x_bytes = problem.x_bytes},
                                              .ffn = call.ffn(),
                                              .h = h,
                                              .squared = call.squared(),
                                              .up_relu = call.up_relu(),
                                              .threshold = problem.weights.threshold,
                                              .activity = call.plan.counts,
                                              .gate_bytes = problem.weights.gate_bytes,
                                              .up_bytes = problem.weights.up_bytes},
                                             call.ctx.stream()));
  TWELL_CUDA_CHECK(launch_quantise_rows({.rows = problem.tokens,
                                         .cols = call.ffn(),
                                         .x = h,
                                         .values = bytes,
                                         .scales = buffers.hidden_scales.data()},
                                        call.ctx.stream()));
  TWELL_CUDA_CHECK(
      batch_ops::launch_linear({.input = {.tokens = problem.tokens,
                                          .width = call.ffn(),
                                          .constant_weights = true,
                                          .x_bytes = {bytes, buffers.hidden_scales.data()}},
                                .cols = call.width(),
                                .residual = problem.add ? problem.y : nullptr,
                                .y = problem.y,
                                .w_bytes = problem.weights.down_bytes},
                               call.ctx.stream()));
}

void launch_dense_gemms(const FfnCallCuda& call) {
  const FfnForwardCuda& problem = call.problem;
  FfnBuffersCuda& buffers = call.buffers;
  if (problem.in_bytes()) {
    byte_dense_ffn_cuda(call.ctx, {.tokens = problem.tokens,
                                   .rows = problem.rows,
                                   .width = call.width(),
                                   .ffn = call.ffn(),
                                   .activation = problem.weights.activation,
                                   .threshold = problem.weights.threshold,
                                   .x = problem.x_bytes,
                                   .gate = problem.weights.gate_bytes,
                                   .up = problem.weights.up_bytes,
                                   .down = problem.weights.down_bytes,
                                   .y = problem.y,
                                   .add = problem.add,
                                   .row_nnz = problem.row_nnz,
                                   .activity = call.plan.counts,
                                   .first = buffers.gate.data(),
                                   .second = buffers.tile_union.values(),
                                   .hidden_scales = buffers.hidden_scales.data()});
    return;
  }
  const Activation activation = problem.weights.activation;
  const bool biased = problem.weights.biased();
  const std::tuple kind{problem.rows, activation, problem.add, biased};
  // Callers of ever new numbers of rows, as PyTorch's are, start again with none.
  if (buffers.dense.size() >= kMostPlans && !buffers.dense.contains(kind)) buffers.dense.clear();
  std::unique_ptr<DenseFfnCuda>& dense = buffers.dense[kind];
  if (!dense) {
    dense = std::make_unique<DenseFfnCuda>(
        call.ctx, problem.rows, call.width(), call.ffn(), call.gated(), buffers.gate.data(),
        buffers.tile_union.values(), activation, problem.add, biased);
  }
  dense->forward(
      call.ctx, problem.weights, problem.x, problem.y,
      {.tokens = problem.tokens, .row_nnz = problem.row_nnz, .activity = call.plan.counts});
}

}  // namespace twell
