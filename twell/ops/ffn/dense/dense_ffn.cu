// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/bias/bias_cuda.h"
#include "twell/ops/ffn/dense/activate.cuh"
#include "twell/ops/ffn/dense/dense_ffn_cuda.h"

namespace twell {
namespace {

// In a gated layer counting is a part of the multiplication. Without a gate it is a pass of its own
// over a sample of the tokens.
constexpr int64_t kSampleStride = 16;
constexpr int kActivateThreads = 256;
// CTAs of the multiplication, four per SM of an H200: enough to use the memory, and few atomic
// additions to the sums, which as one per token took as long as the pass itself.
constexpr int64_t kMostActivateCtas = 528;

// Counts active neurons of the tokens of one CTA.
class ActiveCounter {
 public:
  // Adds one token's counts of all threads of the CTA, which all call it.
  __device__ void add(int count, int64_t row, int32_t* row_nnz) {
    // Alternating rows, so that threads of the next token do not overwrite what is being read.
    __shared__ int of_warp[2][kActivateThreads / 32];
    int* const counts = of_warp[tokens_ % 2];
    ++tokens_;
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int total = 0;
    for (int warp = 0; warp < kActivateThreads / 32; ++warp) total += counts[warp];
    if (row_nnz != nullptr) row_nnz[row] = total;
    nnz_ += static_cast<unsigned long long>(total);
    most_ = max(most_, static_cast<unsigned long long>(total));
  }
  __device__ void store(ActivityCuda* counts) const {
    if (counts == nullptr || threadIdx.x != 0) return;
    atomicAdd(&counts->tokens, tokens_);
    atomicAdd(&counts->nnz, nnz_);
    atomicMax(&counts->max_row_nnz, most_);
  }

 private:
  unsigned long long tokens_ = 0;
  unsigned long long nnz_ = 0, most_ = 0;  // thread 0's
};

// CTAs take tokens in turn.
template <Activation kActivation>
__global__ void __launch_bounds__(kActivateThreads) activate_multiply_kernel(ActivateMultiply p) {
  const int pieces = static_cast<int>(p.ffn / 8);
  const bool counted = p.row_nnz != nullptr || p.counts != nullptr;
  ActiveCounter counter;
  for (int64_t row = blockIdx.x * p.stride; row < p.tokens; row += gridDim.x * p.stride) {
    int count = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < pieces; i += kActivateThreads) {
      const int64_t at = row * pieces + i;
      const uint4 g = reinterpret_cast<const uint4*>(p.g)[at];
      const uint4 u = p.u != nullptr ? reinterpret_cast<const uint4*>(p.u)[at] : uint4{};
      uint4 h;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&g)[k]);
        float2 f = {activate<kActivation>(x.x, p.threshold),
                    activate<kActivation>(x.y, p.threshold)};
        if constexpr (kActivation == Activation::kRelu2) {
          count += !(x.x <= 0.0f) + !(x.y <= 0.0f);  // the square may underflow
        } else {
          count += (f.x != 0.0f) + (f.y != 0.0f);
        }
        if (p.u != nullptr) {
          float2 factor = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&u)[k]);
          if constexpr (kActivation == Activation::kDRelu) {
            factor = {activate<kActivation>(factor.x, 0.0f), activate<kActivation>(factor.y, 0.0f)};
          }
          f = {f.x * factor.x, f.y * factor.y};
        }
        reinterpret_cast<__nv_bfloat162*>(&h)[k] = __floats2bfloat162_rn(f.x, f.y);
      }
      if (p.h != nullptr) reinterpret_cast<uint4*>(p.h)[at] = h;
    }
    if (counted) counter.add(count, row, p.row_nnz);
  }
  counter.store(p.counts);
}

template <Activation kActivation>
cudaError_t launch(const ActivateMultiply& p, cudaStream_t stream) {
  const auto ctas =
      static_cast<unsigned>(std::min(ceil_div(p.tokens, p.stride), kMostActivateCtas));
  activate_multiply_kernel<kActivation><<<ctas, kActivateThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_activate_multiply(const ActivateMultiply& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  switch (p.activation) {
    case Activation::kRelu:
      return launch<Activation::kRelu>(p, stream);
    case Activation::kSilu:
      return launch<Activation::kSilu>(p, stream);
    case Activation::kGelu:
      return launch<Activation::kGelu>(p, stream);
    case Activation::kGeluTanh:
      return launch<Activation::kGeluTanh>(p, stream);
    case Activation::kQuickGelu:
      return launch<Activation::kQuickGelu>(p, stream);
    case Activation::kRelu2:
      return launch<Activation::kRelu2>(p, stream);
    case Activation::kFatRelu:
      return launch<Activation::kFatRelu>(p, stream);
    case Activation::kDRelu:
      return launch<Activation::kDRelu>(p, stream);
  }
  return cudaErrorInvalidValue;
}

DenseFfnCuda::DenseFfnCuda(CudaContext& ctx, int64_t tokens, int64_t width, int64_t ffn, bool gated,
                           __nv_bfloat16* gate, __nv_bfloat16* hidden, Activation activation,
                           bool add, bool biased)
    : tokens_(tokens),
      ffn_(ffn),
      width_(width),
      gated_(gated),
      biased_(biased),
      activation_(activation),
      gate_(gate),
      hidden_(hidden) {
  const bool relu = relu_in_epilogue();
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
                           Activation activation, bool add)
    : DenseFfnCuda(ctx, tokens, width, ffn, gated, nullptr, nullptr, activation, add) {
  owned_ = DeviceBuffer<__nv_bfloat16>(tokens * ffn * (in_place() ? 1 : 2));
  hidden_ = owned_.data();
  if (!in_place()) gate_ = owned_.data() + tokens * ffn;
}

void DenseFfnCuda::tune(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                        __nv_bfloat16* y) {
  if (gated_) gate_plan_->tune(ctx, x, weights.w_gate, gate_);
  up_plan_->tune(ctx, x, weights.w_up, gated_ ? hidden_ : gate_values());
  down_plan_->tune(ctx, hidden_, weights.w_down, y);
}

void DenseFfnCuda::gate(CudaContext& ctx, const FfnWeightsCuda& weights,
                        const __nv_bfloat16* x) const {
  MatmulPlanCuda& plan = gated_ ? *gate_plan_ : *up_plan_;
  plan.run(ctx, x, gated_ ? weights.w_gate : weights.w_up, gate_values());
  if (biased_) add_bias(ctx, gated_ ? weights.b_gate : weights.b_up, ffn_, gate_values());
}

void DenseFfnCuda::add_bias(CudaContext& ctx, const __nv_bfloat16* bias, int64_t width,
                            __nv_bfloat16* x) const {
  TWELL_CUDA_CHECK(
      launch_bias_forward({.tokens = tokens_, .width = width, .bias = bias, .x = x}, ctx.stream()));
}

void DenseFfnCuda::up_down(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y, const DenseCountsCuda& counts) const {
  if (gated_) {
    up_plan_->run(ctx, x, weights.w_up, hidden_);
    if (biased_) add_bias(ctx, weights.b_up, ffn_, hidden_);
  }
  if (!in_place() || counts.row_nnz != nullptr || counts.activity != nullptr) {
    const bool samples = in_place() && counts.row_nnz == nullptr;
    TWELL_CUDA_CHECK(
        launch_activate_multiply({.activation = activation_,
                                  .g = gate_values(),
                                  .u = gated_ ? hidden_ : nullptr,
                                  .h = in_place() ? nullptr : hidden_,
                                  .tokens = counts.tokens == 0 ? tokens_ : counts.tokens,
                                  .ffn = ffn_,
                                  .row_nnz = counts.row_nnz,
                                  .counts = counts.activity,
                                  .stride = samples ? kSampleStride : 1,
                                  .threshold = weights.threshold},
                                 ctx.stream()));
  }
  down_plan_->run(ctx, hidden_, weights.w_down, y);
  if (biased_) add_bias(ctx, weights.b_down, width_, y);
}

void DenseFfnCuda::forward(CudaContext& ctx, const FfnWeightsCuda& weights, const __nv_bfloat16* x,
                           __nv_bfloat16* y, const DenseCountsCuda& counts) const {
  gate(ctx, weights, x);
  up_down(ctx, weights, x, y, counts);
}

}  // namespace twell
