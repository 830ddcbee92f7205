// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/dense_ffn_cuda.h"

#include "twell/ops/ffn/gate_multiply.h"

namespace twell {

DenseFfnCuda::DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated)
    : tokens_(tokens), ffn_(ffn), gated_(gated), hidden_(tokens * ffn) {
  TWELL_CHECK(width % 8 == 0 && ffn % 8 == 0, "width {} and FFN size {} must be multiples of 8",
              width, ffn);
  const MatmulShapeCuda up{tokens, ffn, width, true, !gated};
  if (gated) {
    gate_ = DeviceBuffer<__nv_bfloat16>(tokens * ffn);
    gate_plan_ =
        std::make_unique<MatmulPlanCuda>(ctx, MatmulShapeCuda{tokens, ffn, width, true, true});
  }
  up_plan_ = std::make_unique<MatmulPlanCuda>(ctx, up);
  down_plan_ =
      std::make_unique<MatmulPlanCuda>(ctx, MatmulShapeCuda{tokens, width, ffn, false, false});
}

void DenseFfnCuda::tune(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                        __nv_bfloat16* y) {
  if (gated_) gate_plan_->tune(ctx, x, weights.w_gate, gate_.data());
  up_plan_->tune(ctx, x, weights.w_up, hidden_.data());
  down_plan_->tune(ctx, hidden_.data(), weights.w_down, y);
}

void DenseFfnCuda::gate(CudaContext& ctx, const FfnWeightsCuda& weights,
                        const __nv_bfloat16* x) const {
  gate_plan_->run(ctx, x, weights.w_gate, gate_.data());
}

void DenseFfnCuda::up_down(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y) const {
  up_plan_->run(ctx, x, weights.w_up, hidden_.data());
  TWELL_CUDA_CHECK(
      launch_gate_multiply(hidden_.data(), gate_.data(), tokens_ * ffn_, ctx.stream()));
  down_plan_->run(ctx, hidden_.data(), weights.w_down, y);
}

void DenseFfnCuda::forward(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y) const {
  if (gated_) {
    gate(ctx, weights, x);
    up_down(ctx, weights, x, y);
  } else {
    up_plan_->run(ctx, x, weights.w_up, hidden_.data());
    down_plan_->run(ctx, hidden_.data(), weights.w_down, y);
  }
}

}  // namespace twell
