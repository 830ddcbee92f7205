// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/dense_elementwise.h"

namespace twell {
namespace {

constexpr int kThreads = 256;

// Adds up the counts of a CTA's threads for one token. Either output may be null. All threads call
// it.
__device__ void count_active(int count, int64_t row, int32_t* row_nnz, ActivityCuda* counts) {
  if (row_nnz == nullptr && counts == nullptr) return;
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (row_nnz != nullptr) row_nnz[row] = total;
  if (counts != nullptr) {
    atomicAdd(&counts->tokens, 1ull);
    atomicAdd(&counts->nnz, static_cast<unsigned long long>(total));
    atomicMax(&counts->max_row_nnz, static_cast<unsigned long long>(total));
  }
}

// One CTA per token.
__global__ void __launch_bounds__(kThreads) gate_multiply_kernel(GateMultiply problem) {
  const int64_t row = int64_t{blockIdx.x} * problem.stride;
  const int pieces = static_cast<int>(problem.ffn / 8);
  const auto* gate = reinterpret_cast<const uint4*>(problem.g) + row * pieces;
  auto* up = reinterpret_cast<uint4*>(problem.u) + row * pieces;
  const bool multiplies = problem.u != nullptr;
  int count = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    uint4 g = gate[i];
    uint4 u = multiplies ? up[i] : uint4{};
    auto* a = reinterpret_cast<__nv_bfloat162*>(&u);
    auto* b = reinterpret_cast<__nv_bfloat162*>(&g);
    const auto* bits = reinterpret_cast<const uint32_t*>(&g);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      a[k] = __hmul2(a[k], b[k]);
      count += ((bits[k] & 0x7fffu) != 0) + ((bits[k] & 0x7fff0000u) != 0);
    }
    if (multiplies) up[i] = u;
  }
  count_active(count, row, problem.row_nnz, problem.counts);
}

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

// One CTA per token.
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

cudaError_t launch_gate_multiply(const GateMultiply& problem, cudaStream_t stream) {
  const int64_t rows = (problem.tokens + problem.stride - 1) / problem.stride;
  gate_multiply_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}

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
