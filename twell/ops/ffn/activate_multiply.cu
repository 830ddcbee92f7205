// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/activate_multiply.h"
#include "twell/ops/ffn/count_active.cuh"

namespace twell {
namespace {

constexpr int kThreads = 256;

template <Activation kActivation>
__device__ float activate(float x) {
  if constexpr (kActivation == Activation::kRelu) return fmaxf(x, 0.0f);
  if constexpr (kActivation == Activation::kSilu) return x / (1.0f + expf(-x));
  if constexpr (kActivation == Activation::kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  }
  return x / (1.0f + expf(-1.702f * x));  // quick GELU
}

// A CTA per token.
template <Activation kActivation>
__global__ void __launch_bounds__(kThreads) activate_multiply_kernel(ActivateMultiply p) {
  const int pieces = static_cast<int>(p.ffn / 8);
  const int64_t row = int64_t{blockIdx.x};
  int count = 0;
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    const int64_t at = row * pieces + i;
    const uint4 g = reinterpret_cast<const uint4*>(p.g)[at];
    const uint4 u = p.u != nullptr ? reinterpret_cast<const uint4*>(p.u)[at] : uint4{};
    uint4 h;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&g)[k]);
      float2 f = {activate<kActivation>(x.x), activate<kActivation>(x.y)};
      count += (f.x != 0.0f) + (f.y != 0.0f);
      if (p.u != nullptr) {
        const float2 factor = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&u)[k]);
        f = {f.x * factor.x, f.y * factor.y};
      }
      reinterpret_cast<__nv_bfloat162*>(&h)[k] = __floats2bfloat162_rn(f.x, f.y);
    }
    reinterpret_cast<uint4*>(p.h)[at] = h;
  }
  count_active(count, row, p.row_nnz, p.counts);
}

template <Activation kActivation>
cudaError_t launch(const ActivateMultiply& p, cudaStream_t stream) {
  activate_multiply_kernel<kActivation>
      <<<static_cast<unsigned>(p.tokens), kThreads, 0, stream>>>(p);
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
  }
  return cudaErrorInvalidValue;
}

}  // namespace twell
