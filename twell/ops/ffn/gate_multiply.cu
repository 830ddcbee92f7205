// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gate_multiply.h"

namespace twell {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gate_multiply_kernel(uint4* u, const uint4* g, int64_t pieces) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= pieces) return;
  uint4 product = u[i];
  const uint4 gate = g[i];
  auto* a = reinterpret_cast<__nv_bfloat162*>(&product);
  const auto* b = reinterpret_cast<const __nv_bfloat162*>(&gate);
#pragma unroll
  for (int k = 0; k < 4; ++k) a[k] = __hmul2(a[k], b[k]);
  u[i] = product;
}

}  // namespace

cudaError_t launch_gate_multiply(__nv_bfloat16* u, const __nv_bfloat16* g, int64_t n,
                                 cudaStream_t stream) {
  const int64_t pieces = n / 8;
  gate_multiply_kernel<<<static_cast<unsigned>((pieces + kThreads - 1) / kThreads), kThreads, 0,
                         stream>>>(reinterpret_cast<uint4*>(u), reinterpret_cast<const uint4*>(g),
                                   pieces);
  return cudaGetLastError();
}

}  // namespace twell
