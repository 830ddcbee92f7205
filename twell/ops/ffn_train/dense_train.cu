// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/ops/ffn_train/dense_train_kernels.h"

namespace twell::ffn_train {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = static_cast<int>(kHiddenRows);

// The CTA's sum, on thread 0; in a fixed order.
__device__ double block_sum(double value) {
  __shared__ double of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0) {
    for (const double part : of_warp) sum += part;
  }
  __syncthreads();
  return sum;
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// h of a pair of neurons; what fires in bits 0 and 1 of `fired`; adds to l1.
__device__ __forceinline__ uint32_t hidden_pair(uint32_t g, uint32_t u, bool gated, uint32_t& fired,
                                                float& l1) {
  const bool first = (g & 0x7fff) != 0, second = (g & 0x7fff0000) != 0;
  fired = static_cast<uint32_t>(first) | static_cast<uint32_t>(second) << 1;
  const float h0 = first ? low(g) * (gated ? low(u) : 1.0f) : 0.0f;
  const float h1 = second ? high(g) * (gated ? high(u) : 1.0f) : 0.0f;
  l1 += fabsf(h0);
  l1 += fabsf(h1);
  return pack(h0, h1);
}

// A CTA: kRows tokens.
__global__ void __launch_bounds__(kThreads) hidden_forward_kernel(HiddenForward problem) {
  __shared__ int row_nnz[kRows];
  const int pieces = static_cast<int>(problem.ffn / 8);
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, problem.tokens - first_row));
  const auto* g = reinterpret_cast<const uint4*>(problem.g) + first_row * pieces;
  const auto* u = reinterpret_cast<const uint4*>(problem.u) + first_row * pieces;
  auto* h = reinterpret_cast<uint4*>(problem.h) + first_row * pieces;
  const bool gated = problem.u != nullptr;
  if (threadIdx.x < kRows) row_nnz[threadIdx.x] = 0;
  __syncthreads();
  int nnz[kRows] = {};
  float l1 = 0.0f;
  for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
    uint32_t any = 0;  // a bit per neuron of the piece
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) break;
      const uint4 gate = g[int64_t{row} * pieces + piece];
      const uint4 up = gated ? u[int64_t{row} * pieces + piece] : uint4{};
      uint32_t fired[4];
      uint4 out;
      out.x = hidden_pair(gate.x, up.x, gated, fired[0], l1);
      out.y = hidden_pair(gate.y, up.y, gated, fired[1], l1);
      out.z = hidden_pair(gate.z, up.z, gated, fired[2], l1);
      out.w = hidden_pair(gate.w, up.w, gated, fired[3], l1);
      const uint32_t bits = fired[0] | fired[1] << 2 | fired[2] << 4 | fired[3] << 6;
      nnz[row] += __popc(bits);
      any |= bits;
      if (gated) h[int64_t{row} * pieces + piece] = out;
    }
    if (problem.active != nullptr) {
      uint8_t* flags = problem.active + piece * 8;
      for (; any != 0; any &= any - 1) {
        const int neuron = __ffs(static_cast<int>(any)) - 1;
        if (flags[neuron] == 0) flags[neuron] = 1;
      }
    }
  }
  if (problem.counts == nullptr) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int sum = __reduce_add_sync(~0u, nnz[row]);
    if (threadIdx.x % 32 == 0) atomicAdd(&row_nnz[row], sum);
  }
  const double sum = block_sum(static_cast<double>(l1));
  __shared__ bool last;
  if (threadIdx.x == 0) {
    int total = 0, most = 0;
    for (int row = 0; row < rows; ++row) {
      total += row_nnz[row];
      most = max(most, row_nnz[row]);
    }
    atomicAdd(&problem.counts->nnz, static_cast<unsigned long long>(total));
    atomicAdd(&problem.counts->tokens, static_cast<unsigned long long>(rows));
    atomicMax(&problem.counts->max_row_nnz, most);
    problem.sum.parts[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(problem.sum.ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  double all = 0.0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) all += __ldcg(problem.sum.parts + i);
  all = block_sum(all);
  if (threadIdx.x == 0) {
    problem.counts->l1_sum += all;
    *problem.sum.ticket = 0;
  }
}

__device__ __forceinline__ float with_l1(float d_h, float h, float l1_scale) {
  return d_h + (h > 0.0f ? l1_scale : (h < 0.0f ? -l1_scale : 0.0f));
}

__device__ __forceinline__ void backward_pair(uint32_t& d_h, uint32_t& g, uint32_t& u, bool gated,
                                              float l1_scale) {
  const float g0 = low(g), g1 = high(g);
  const bool first = (g & 0x7fff) != 0, second = (g & 0x7fff0000) != 0;
  if (!gated) {
    d_h = pack(first ? with_l1(low(d_h), g0, l1_scale) : 0.0f,
               second ? with_l1(high(d_h), g1, l1_scale) : 0.0f);
    return;
  }
  const float u0 = low(u), u1 = high(u);
  const float h0 = first ? g0 * u0 : 0.0f, h1 = second ? g1 * u1 : 0.0f;
  const float d0 = with_l1(low(d_h), h0, l1_scale), d1 = with_l1(high(d_h), h1, l1_scale);
  g = pack(first ? d0 * u0 : 0.0f, second ? d1 * u1 : 0.0f);
  u = pack(first ? d0 * g0 : 0.0f, second ? d1 * g1 : 0.0f);
  d_h = pack(h0, h1);
}

__global__ void __launch_bounds__(kThreads) hidden_backward_kernel(HiddenBackward problem) {
  const int64_t pieces = problem.size / 8;
  const bool gated = problem.u != nullptr;
  const float l1_scale = *problem.l1_scale;
  auto* d_h = reinterpret_cast<uint4*>(problem.d_h);
  auto* g = reinterpret_cast<uint4*>(problem.g);
  auto* u = reinterpret_cast<uint4*>(problem.u);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pieces;
       i += int64_t{gridDim.x} * kThreads) {
    uint4 d = d_h[i], gate = g[i], up = gated ? u[i] : uint4{};
    backward_pair(d.x, gate.x, up.x, gated, l1_scale);
    backward_pair(d.y, gate.y, up.y, gated, l1_scale);
    backward_pair(d.z, gate.z, up.z, gated, l1_scale);
    backward_pair(d.w, gate.w, up.w, gated, l1_scale);
    d_h[i] = d;
    if (!gated) continue;
    g[i] = gate;
    u[i] = up;
  }
}

}  // namespace

cudaError_t launch_hidden_forward(const HiddenForward& problem, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>(hidden_ctas(problem.tokens));
  hidden_forward_kernel<<<ctas, kThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}

cudaError_t launch_hidden_backward(const HiddenBackward& problem, cudaStream_t stream) {
  const int64_t ctas = (problem.size / 8 + kThreads - 1) / kThreads;
  hidden_backward_kernel<<<static_cast<unsigned>(std::min(ctas, int64_t{1} << 20)), kThreads, 0,
                           stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace twell::ffn_train
