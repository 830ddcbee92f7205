// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "twell/base/for_each.cuh"
#include "twell/ops/adamw/adamw_cuda.h"
#include "twell/ops/matmul/matmul_cuda.h"
#include "twell/ops/muon/muon_cuda.h"

namespace twell {
namespace {

struct Momentum {
  MuonMomentumCuda p;
  __device__ void operator()(int64_t i) const {
    const MuonCoefficients& c = *p.coefficients;
    const float clip = *p.clip_factor;
    if (isnan(clip)) return;
    const float scaled = __fmul_rn(__fmul_rn(c.grad_scale, clip), p.grad[i]);
    const float own = __fmul_rn(c.one_minus_momentum, scaled);
    const float m = fmaf(c.momentum, p.exp_avg[i], own);
    p.exp_avg[i] = m;
    p.grad[i] = fmaf(c.momentum, m, own);
  }
};

struct Apply {
  MuonApplyCuda p;
  __device__ void operator()(int64_t i) const {
    const MuonCoefficients& c = *p.coefficients;
    if (isnan(*p.clip_factor)) return;
    const float w = join(p.weight[i], p.weight_rest[i]);
    const float step = __fmul_rn(c.step_size, p.shape_factor);
    split(fmaf(-step, p.orthogonal[i], __fmul_rn(c.decay, w)), p.weight[i], p.weight_rest[i]);
  }
};

// to[i] = from[i] / (norm + eps) in bf16.
struct Normalise {
  const float* from;
  const GradientNorm* norm;
  __nv_bfloat16* to;
  __device__ void operator()(int64_t i) const {
    const double scale = 1.0 / (norm->norm + static_cast<double>(kNewtonSchulzEps));
    to[i] = __float2bfloat16_rn(__fmul_rn(from[i], static_cast<float>(scale)));
  }
};

// factor = a I + b gram + c gram^2, all [side, side].
struct Polynomial {
  const __nv_bfloat16* gram;
  const float* square;
  int64_t side;
  __nv_bfloat16* factor;
  __device__ void operator()(int64_t i) const {
    float value = kNewtonSchulzB * __bfloat162float(gram[i]) + kNewtonSchulzC * square[i];
    if (i / side == i % side) value += kNewtonSchulzA;
    factor[i] = __float2bfloat16_rn(value);
  }
};

// What orthogonalise_cuda needs for a matrix of this shape, one array behind the other.
struct Workspace {
  int64_t size = 0;  // bytes
  int64_t x, next, gram, factor, square, partials, norm;
  Workspace(int64_t rows, int64_t cols) {
    const int64_t count = rows * cols, side = std::min(rows, cols);
    x = take<__nv_bfloat16>(count);
    next = take<__nv_bfloat16>(count);
    gram = take<__nv_bfloat16>(side * side);
    factor = take<__nv_bfloat16>(side * side);
    square = take<float>(side * side);
    partials = take<double>(gradient_norm_partials(count));
    norm = take<GradientNorm>(1);
  }
  template <typename T>
  int64_t take(int64_t count) {
    constexpr int64_t kAlign = 256;
    const int64_t at = size;
    size += (count * static_cast<int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
    return at;
  }
};

}  // namespace

cudaError_t launch_muon_momentum(const MuonMomentumCuda& p, cudaStream_t stream) {
  return launch_for_each(p.size, Momentum{p}, stream);
}

cudaError_t launch_muon_apply(const MuonApplyCuda& p, cudaStream_t stream) {
  return launch_for_each(p.size, Apply{p}, stream);
}

int64_t orthogonalise_bytes(int64_t rows, int64_t cols) { return Workspace(rows, cols).size; }

void orthogonalise_cuda(CudaContext& ctx, float* matrix, int64_t rows, int64_t cols,
                        std::byte* workspace) {
  const Workspace at(rows, cols);
  const int64_t side = std::min(rows, cols);
  const bool tall = rows > cols;
  auto* x = reinterpret_cast<__nv_bfloat16*>(workspace + at.x);
  auto* next = reinterpret_cast<__nv_bfloat16*>(workspace + at.next);
  auto* const gram = reinterpret_cast<__nv_bfloat16*>(workspace + at.gram);
  auto* const factor = reinterpret_cast<__nv_bfloat16*>(workspace + at.factor);
  auto* const square = reinterpret_cast<float*>(workspace + at.square);
  auto* const norm = reinterpret_cast<GradientNorm*>(workspace + at.norm);
  TWELL_CUDA_CHECK(
      launch_gradient_norm({.size = rows * cols,
                            .grad = matrix,
                            .clip_norm = 0.0,
                            .partial = reinterpret_cast<double*>(workspace + at.partials),
                            .result = norm},
                           ctx.stream()));
  TWELL_CUDA_CHECK(launch_for_each(rows * cols, Normalise{matrix, norm, x}, ctx.stream()));
  for (int step = 1; step <= kNewtonSchulzSteps; ++step) {
    matmul_cuda(ctx,
                {.rows = side,
                 .cols = side,
                 .inner = std::max(rows, cols),
                 .trans_b = !tall,
                 .trans_a = tall},
                x, x, gram);
    // The gram is symmetric, whether its upper half is rounded as the lower one or not.
    matmul_cuda(ctx, {.rows = side, .cols = side, .inner = side, .trans_b = true, .f32_out = true},
                gram, gram, square);
    TWELL_CUDA_CHECK(
        launch_for_each(side * side, Polynomial{gram, square, side, factor}, ctx.stream()));
    const bool last = step == kNewtonSchulzSteps;
    matmul_cuda(ctx, {.rows = rows, .cols = cols, .inner = side, .f32_out = last},
                tall ? x : factor, tall ? factor : x,
                last ? static_cast<void*>(matrix) : static_cast<void*>(next));
    std::swap(x, next);
  }
}

}  // namespace twell
