// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn_train/ffn_train_parts_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell::ffn_train {

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                        FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace) {
  const auto& [max_tokens, width, ffn, gated] = saved.shape;
  const FfnTrainWeightsCuda& weights = problem.weights;
  const MatmulShapeCuda relu{
      .rows = problem.tokens, .cols = ffn, .inner = width, .trans_b = true, .relu = true};
  matmul_cuda(ctx, relu, problem.x, gated ? weights.w_gate : weights.w_up, saved.gate.data());
  if (gated) {
    const MatmulShapeCuda linear{
        .rows = problem.tokens, .cols = ffn, .inner = width, .trans_b = true};
    matmul_cuda(ctx, linear, problem.x, weights.w_up, saved.up.data());
  }
  __nv_bfloat16* hidden = gated ? workspace.hidden.data() : saved.gate.data();
  const bool counts = problem.counts != nullptr || problem.active != nullptr;
  if (gated || counts) {
    TWELL_CUDA_CHECK(
        launch_hidden_forward({.g = saved.gate.data(),
                               .u = gated ? saved.up.data() : nullptr,
                               .h = gated ? hidden : nullptr,
                               .tokens = problem.tokens,
                               .ffn = ffn,
                               .counts = problem.counts,
                               .active = problem.active,
                               .sum = {workspace.sum_parts.data(), workspace.ticket.data()}},
                              ctx.stream()));
  }
  matmul_cuda(ctx, {.rows = problem.tokens, .cols = width, .inner = ffn}, hidden, weights.w_down,
              problem.y);
}

void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace) {
  const auto& [max_tokens, width, ffn, gated] = saved.shape;
  const FfnTrainWeightsCuda& weights = problem.weights;
  const auto linear = [&, rows = problem.tokens, cols = ffn, inner = width](
                          const __nv_bfloat16* x, const __nv_bfloat16* w, const __nv_bfloat16* d_y,
                          __nv_bfloat16* d_x, bool d_x_add, float* d_w) {
    linear_backward_cuda(ctx, {.rows = rows,
                               .cols = cols,
                               .inner = inner,
                               .x = x,
                               .w = w,
                               .d_y = d_y,
                               .d_x = d_x,
                               .d_x_add = d_x_add,
                               .d_w = d_w});
  };
  __nv_bfloat16* gate = saved.gate.data();
  __nv_bfloat16* d_hidden = workspace.hidden.data();
  const MatmulShapeCuda through_down{
      .rows = problem.tokens, .cols = ffn, .inner = width, .trans_b = true};
  matmul_cuda(ctx, through_down, problem.d_y, weights.w_down, d_hidden);
  if (!gated) linear(problem.d_y, nullptr, gate, nullptr, false, problem.grads.w_down);
  TWELL_CUDA_CHECK(launch_hidden_backward({.d_h = d_hidden,
                                           .g = gate,
                                           .u = gated ? saved.up.data() : nullptr,
                                           .size = problem.tokens * ffn,
                                           .l1_scale = problem.l1_scale},
                                          ctx.stream()));
  if (!gated) {
    linear(problem.x, weights.w_up, d_hidden, problem.d_x, false, problem.grads.w_up);
    return;
  }
  // d_h is h now, g is d_g and u is d_u.
  linear(problem.d_y, nullptr, d_hidden, nullptr, false, problem.grads.w_down);
  linear(problem.x, weights.w_gate, gate, problem.d_x, false, problem.grads.w_gate);
  linear(problem.x, weights.w_up, saved.up.data(), problem.d_x, true, problem.grads.w_up);
}

}  // namespace twell::ffn_train
