// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/count_active.cuh"
#include "twell/ops/ffn/gate_multiply.h"

namespace twell {
namespace {

constexpr int kThreads = 256;

// A CTA per token.
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

}  // namespace

cudaError_t launch_gate_multiply(const GateMultiply& problem, cudaStream_t stream) {
  const int64_t rows = (problem.tokens + problem.stride - 1) / problem.stride;
  gate_multiply_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace twell
