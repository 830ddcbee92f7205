// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/ops/ffn_train/ffn_train_kernels.h"
#include "twell/ops/ffn_train/hidden_pairs.cuh"

namespace twell::ffn_train {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = static_cast<int>(kHiddenRows);

// Sets bits of a word in global memory. Returns how many were 0 before; each bit counts for one
// thread only.
__device__ __forceinline__ int add_to_union(uint32_t* word, uint32_t bits) {
  if ((bits & ~__ldcg(word)) == 0) return 0;
  return __popc(bits & ~atomicOr(word, bits));
}

// Each CTA handles kRows tokens.
__global__ void __launch_bounds__(kThreads) hidden_forward_kernel(HiddenForward problem) {
  __shared__ int row_nnz[kRows];
  const int pieces = static_cast<int>(problem.ffn / 8);
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, problem.tokens - first_row));
  const auto* g = reinterpret_cast<const uint4*>(problem.g) + first_row * pieces;
  const auto* u = reinterpret_cast<const uint4*>(problem.u) + first_row * pieces;
  auto* h = reinterpret_cast<uint4*>(problem.h) + first_row * pieces;
  const bool gated = problem.u != nullptr;
  const uint4 ones{kOnes, kOnes, kOnes, kOnes};
  if (threadIdx.x < kRows) row_nnz[threadIdx.x] = 0;
  __syncthreads();
  uint32_t* mask = problem.union_mask + first_row / kUnionTokens * ((problem.ffn + 31) / 32);
  int nnz[kRows] = {}, union_neurons = 0;
  float l1 = 0.0f;
  for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
    uint32_t any = 0;  // bit per neuron of the piece: it fires on one of the rows
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) break;
      const uint4 gate = g[int64_t{row} * pieces + piece];
      const uint4 up = gated ? u[int64_t{row} * pieces + piece] : ones;
      const uint4 out{hidden_pair(gate.x, up.x, l1), hidden_pair(gate.y, up.y, l1),
                      hidden_pair(gate.z, up.z, l1), hidden_pair(gate.w, up.w, l1)};
      const uint32_t bits = fired_bits(gate);
      nnz[row] += __popc(bits);
      any |= bits;
      if (gated) h[int64_t{row} * pieces + piece] = out;
    }
    union_neurons += add_to_union(mask + piece / 4, any << (piece % 4 * 8));
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
  union_neurons = __reduce_add_sync(~0u, union_neurons);
  if (threadIdx.x % 32 == 0 && union_neurons > 0) {
    atomicAdd(&problem.counts->union_neurons, static_cast<unsigned long long>(union_neurons));
  }
  const double sum = block_sum<kThreads>(static_cast<double>(l1));
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
  all = block_sum<kThreads>(all);
  if (threadIdx.x == 0) {
    problem.counts->l1_sum += all;
    *problem.sum.ticket = 0;
  }
}

__global__ void __launch_bounds__(kThreads) hidden_backward_kernel(HiddenBackward problem) {
  const int64_t pieces = problem.size / 8;
  const bool gated = problem.u != nullptr;
  const float l1_scale = *problem.l1_scale;
  const uint4 ones{kOnes, kOnes, kOnes, kOnes};
  auto* d_h = reinterpret_cast<uint4*>(problem.d_h);
  auto* g = reinterpret_cast<uint4*>(problem.g);
  auto* u = reinterpret_cast<uint4*>(problem.u);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pieces;
       i += int64_t{gridDim.x} * kThreads) {
    uint4 d = d_h[i], gate = g[i], up = gated ? u[i] : ones;
    backward_eight(d, gate, up, l1_scale);
    d_h[i] = gated ? d : gate;
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
