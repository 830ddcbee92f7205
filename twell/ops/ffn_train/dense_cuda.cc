// SPDX-License-Identifier: Apache-2.0
// The dense execution of the feed-forward layer in training on the GPU: cuBLASLt products with
// elementwise kernels between them.
#include "twell/ops/ffn_train/ffn_train_kernels.h"
#include "twell/ops/ffn_train/ffn_train_parts_cuda.h"
#include "twell/ops/matmul/linear_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"

namespace twell::ffn_train {
namespace {

struct SavedDense {
  __nv_bfloat16* gate;  // [max_tokens, F] g; without a gate h
  __nv_bfloat16* up;    // [max_tokens, F] u; null without a gate

  SavedDense(const FfnTrainShapeCuda& shape, Carver& carver)
      : gate(carver.take<__nv_bfloat16>(shape.max_tokens * shape.ffn)),
        up(carver.take<__nv_bfloat16>(shape.gated ? shape.max_tokens * shape.ffn : 0)) {}
  static SavedDense of(const FfnSavedCuda::Parts& saved) {
    Carver carver = device_carver(saved.memory.data());
    return {saved.shape, carver};
  }
};

struct DenseWorkspace {
  OrderedSum sum;
  uint32_t* union_mask;   // [union_mask_words]
  __nv_bfloat16* hidden;  // [max_tokens, F] h, then d_h

  DenseWorkspace(const FfnTrainShapeCuda& shape, Carver& carver) {
    sum.ticket = carver.take<uint32_t>(1);
    sum.parts = carver.take<double>(hidden_ctas(shape.max_tokens));
    union_mask = carver.take<uint32_t>(union_mask_words(shape.max_tokens, shape.ffn));
    hidden = carver.take<__nv_bfloat16>(shape.max_tokens * shape.ffn);
  }
  static DenseWorkspace of(const FfnTrainWorkspaceCuda::Parts& workspace) {
    Carver carver = device_carver(workspace.memory);
    return {workspace.shape, carver};
  }
};

}  // namespace

int64_t dense_saved_bytes(const FfnTrainShapeCuda& shape) {
  Carver carver = device_carver();
  SavedDense(shape, carver);
  return carver.bytes();
}

int64_t dense_workspace_bytes(const FfnTrainShapeCuda& shape) {
  Carver carver = device_carver();
  DenseWorkspace(shape, carver);
  return carver.bytes();
}

void dense_forward_cuda(CudaContext& ctx, const FfnTrainForwardCuda& problem,
                        FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace) {
  const auto& [max_tokens, width, ffn, gated] = saved.shape;
  const FfnTrainWeightsCuda& weights = problem.weights;
  const SavedDense kept = SavedDense::of(saved);
  const DenseWorkspace work = DenseWorkspace::of(workspace);
  const MatmulShapeCuda relu{
      .rows = problem.tokens, .cols = ffn, .inner = width, .trans_b = true, .relu = true};
  matmul_cuda(ctx, relu, problem.x, gated ? weights.w_gate : weights.w_up, kept.gate);
  if (gated) {
    const MatmulShapeCuda linear{
        .rows = problem.tokens, .cols = ffn, .inner = width, .trans_b = true};
    matmul_cuda(ctx, linear, problem.x, weights.w_up, kept.up);
  }
  __nv_bfloat16* hidden = gated ? work.hidden : kept.gate;
  const bool counts = problem.counts != nullptr || problem.active != nullptr;
  if (gated || counts) {
    const int64_t mask_bytes =
        union_mask_words(problem.tokens, ffn) * static_cast<int64_t>(sizeof(uint32_t));
    TWELL_CUDA_CHECK(
        cudaMemsetAsync(work.union_mask, 0, static_cast<size_t>(mask_bytes), ctx.stream()));
    TWELL_CUDA_CHECK(launch_hidden_forward({.g = kept.gate,
                                            .u = gated ? kept.up : nullptr,
                                            .h = gated ? hidden : nullptr,
                                            .tokens = problem.tokens,
                                            .ffn = ffn,
                                            .counts = problem.counts,
                                            .active = problem.active,
                                            .union_mask = work.union_mask,
                                            .sum = work.sum},
                                           ctx.stream()));
  }
  matmul_cuda(ctx, {.rows = problem.tokens, .cols = width, .inner = ffn}, hidden, weights.w_down,
              problem.y);
}

void dense_backward_cuda(CudaContext& ctx, const FfnTrainBackwardCuda& problem,
                         FfnSavedCuda::Parts& saved, FfnTrainWorkspaceCuda::Parts& workspace) {
  const auto& [max_tokens, width, ffn, gated] = saved.shape;
  const FfnTrainWeightsCuda& weights = problem.weights;
  const SavedDense kept = SavedDense::of(saved);
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
                               .d_w = d_w,
                               .d_w_add = problem.grads.add});
  };
  __nv_bfloat16* gate = kept.gate;
  __nv_bfloat16* d_hidden = DenseWorkspace::of(workspace).hidden;
  const MatmulShapeCuda through_down{
      .rows = problem.tokens, .cols = ffn, .inner = width, .trans_b = true};
  matmul_cuda(ctx, through_down, problem.d_y, weights.w_down, d_hidden);
  if (!gated) linear(problem.d_y, nullptr, gate, nullptr, false, problem.grads.w_down);
  TWELL_CUDA_CHECK(launch_hidden_backward({.d_h = d_hidden,
                                           .g = gate,
                                           .u = gated ? kept.up : nullptr,
                                           .size = problem.tokens * ffn,
                                           .l1_scale = problem.l1_scale},
                                          ctx.stream()));
  if (!gated) {
    linear(problem.x, weights.w_up, d_hidden, problem.d_x, false, problem.grads.w_up);
    return;
  }
  // d_hidden holds h now, gate d_g and kept.up d_u.
  linear(problem.d_y, nullptr, d_hidden, nullptr, false, problem.grads.w_down);
  linear(problem.x, weights.w_gate, gate, problem.d_x, false, problem.grads.w_gate);
  linear(problem.x, weights.w_up, kept.up, problem.d_x, true, problem.grads.w_up);
}

}  // namespace twell::ffn_train
