// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/dense_ffn_cuda.h"

#include "twell/ops/ffn/dense_elementwise.h"

namespace twell {
namespace {

// In a gated layer counting is free, as part of the multiplication. Without a gate it is a pass of
// its own over a sample of the tokens.
constexpr int64_t kSampleStride = 16;

}  // namespace

DenseFfnCuda::DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
                           __nv_bfloat16* gate, __nv_bfloat16* hidden, Activation activation,
                           bool add)
    : tokens_(tokens),
      ffn_(ffn),
      gated_(gated),
      activation_(activation),
      gate_(gate),
      hidden_(hidden) {
  const bool relu = activation == Activation::kRelu;
  TWELL_CHECK(width % 8 == 0 && ffn % 8 == 0, "width {} and FFN size {} must be multiples of 8",
              width, ffn);
  const MatmulShapeCuda up{
      .rows = tokens, .cols = ffn, .inner = width, .trans_b = true, .relu = relu && !gated};
  if (gated) {
    const MatmulShapeCuda shape{
        .rows = tokens, .cols = ffn, .inner = width, .trans_b = true, .relu = relu};
    gate_plan_ = std::make_unique<MatmulPlanCuda>(ctx, shape);
  }
  up_plan_ = std::make_unique<MatmulPlanCuda>(ctx, up);
  const MatmulShapeCuda down{.rows = tokens, .cols = width, .inner = ffn, .add = add};
  down_plan_ = std::make_unique<MatmulPlanCuda>(ctx, down);
}

DenseFfnCuda::DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
                           bool add)
    : DenseFfnCuda(ctx, tokens, width, ffn, gated, nullptr, nullptr, Activation::kRelu, add) {
  owned_ = DeviceBuffer<__nv_bfloat16>(tokens * ffn * (gated ? 2 : 1));
  hidden_ = owned_.data();
  if (gated) gate_ = owned_.data() + tokens * ffn;
}

void DenseFfnCuda::tune(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                        __nv_bfloat16* y) {
  if (gated_) gate_plan_->tune(ctx, x, weights.w_gate, gate_);
  up_plan_->tune(ctx, x, weights.w_up, hidden_);
  down_plan_->tune(ctx, hidden_, weights.w_down, y);
}

void DenseFfnCuda::gate(CudaContext& ctx, const FfnWeightsCuda& weights,
                        const __nv_bfloat16* x) const {
  gate_plan_->run(ctx, x, weights.w_gate, gate_);
}

// hidden = f(g) * u, or f(g) without u.
void DenseFfnCuda::activate(CudaContext& ctx, const __nv_bfloat16* g, const __nv_bfloat16* u,
                            const DenseCountsCuda& counts) const {
  TWELL_CUDA_CHECK(launch_activate_multiply({.activation = activation_,
                                             .g = g,
                                             .u = u,
                                             .h = hidden_,
                                             .tokens = tokens_,
                                             .ffn = ffn_,
                                             .row_nnz = counts.row_nnz,
                                             .counts = counts.activity},
                                            ctx.stream()));
}

void DenseFfnCuda::up_down(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y, const DenseCountsCuda& counts) const {
  up_plan_->run(ctx, x, weights.w_up, hidden_);
  if (activation_ != Activation::kRelu) {
    activate(ctx, gate_, hidden_, counts);
  } else {
    TWELL_CUDA_CHECK(launch_gate_multiply({.u = hidden_,
                                           .g = gate_,
                                           .tokens = tokens_,
                                           .ffn = ffn_,
                                           .row_nnz = counts.row_nnz,
                                           .counts = counts.activity},
                                          ctx.stream()));
  }
  down_plan_->run(ctx, hidden_, weights.w_down, y);
}

void DenseFfnCuda::forward(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y, const DenseCountsCuda& counts) const {
  if (gated_) {
    gate(ctx, weights, x);
    up_down(ctx, weights, x, y, counts);
    return;
  }
  up_plan_->run(ctx, x, weights.w_up, hidden_);
  if (activation_ != Activation::kRelu) {
    activate(ctx, hidden_, nullptr, counts);
  } else if (counts.row_nnz != nullptr || counts.activity != nullptr) {
    TWELL_CUDA_CHECK(launch_gate_multiply({.g = hidden_,
                                           .tokens = tokens_,
                                           .ffn = ffn_,
                                           .row_nnz = counts.row_nnz,
                                           .counts = counts.activity,
                                           .stride = counts.row_nnz != nullptr ? 1 : kSampleStride},
                                          ctx.stream()));
  }
  down_plan_->run(ctx, hidden_, weights.w_down, y);
}

}  // namespace twell
