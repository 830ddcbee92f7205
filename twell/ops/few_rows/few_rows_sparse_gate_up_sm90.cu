// SPDX-License-Identifier: Apache-2.0
// Gate of all of a CTA's neurons, then up for those of them that fired, together.
#include "twell/ops/few_rows/product.cuh"

namespace twell::few_rows {
namespace {

constexpr int kMaxNeurons = kThreads;  // of a CTA: a thread each when they are listed
constexpr int kMaxGroups = kMaxNeurons / kGroup;
constexpr int kFinishers = kPairs * kMaxTokens;  // threads, two warps

// What the CTA found out about its neurons, numbered 16 per group it takes.
struct Fired {
  __nv_bfloat16 gate[kMaxNeurons][kMaxTokens];
  uint32_t mask[2][kMaxGroups];  // by finishing warp: a bit per neuron of a group
  int warp_counts[kWarps];
  uint16_t list[kMaxNeurons];
};

__device__ __forceinline__ __nv_bfloat16 gate_value(float sum) {
  return __float2bfloat16(sum < 0.0f ? 0.0f : sum);  // NaN stays
}
__device__ __forceinline__ bool fires(__nv_bfloat16 gate) {
  return !(__bfloat162float(gate) == 0.0f);
}

struct SparseGroups {
  const SparseGateUp& p;
  Fired& fired;
  int nnz = 0;  // of a finishing warp

  __device__ int count() const { return static_cast<int>((p.ffn + kGroup - 1) / kGroup); }
  __device__ static int local(int group) {
    return (group - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x);
  }
  __device__ static int64_t neuron(int local_neuron) {
    return (blockIdx.x + int64_t{local_neuron} / kGroup * gridDim.x) * kGroup +
           local_neuron % kGroup;
  }
  __device__ Rows rows(int group, int pair) const {
    const int64_t row = int64_t{group} * kGroup + pair;
    const __nv_bfloat16* low = p.first + row * p.input.width;
    return {low, row + kPairs < p.ffn ? low + kPairs * p.input.width : nullptr};
  }
  __device__ void finish(int group, const Sums& sums) {
    const int at = local(group) * kGroup + sums.pair;
    // A row that does not exist is zeros, whose product with NaN is NaN.
    const bool exists = int64_t{group} * kGroup + sums.pair + kPairs < p.ffn;
    const __nv_bfloat16 low = gate_value(sums.low), high = gate_value(exists ? sums.high : 0.0f);
    fired.gate[at][sums.token] = low;
    fired.gate[at + kPairs][sums.token] = high;
    // Lane: 8 * (token % 4) + pair.
    uint32_t lows = __ballot_sync(~0u, fires(low)), highs = __ballot_sync(~0u, fires(high));
    nnz += __popc(lows) + __popc(highs);
#pragma unroll
    for (int step = 16; step >= kPairs; step /= 2) {
      lows |= lows >> step;
      highs |= highs >> step;
    }
    if (threadIdx.x % 32 == 0) {
      fired.mask[threadIdx.x / 32][local(group)] = (lows & 0xff) | (highs & 0xff) << kPairs;
    }
  }

  // Lists the CTA's neurons that fired, asks for their rows of w_down; returns how many.
  __device__ int list() const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int groups = (count() - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                       static_cast<int>(gridDim.x);
    __syncthreads();
    bool mine = false;
    if (thread / kGroup < groups) {
      const uint32_t mask = fired.mask[0][thread / kGroup] | fired.mask[1][thread / kGroup];
      mine = (mask >> (thread % kGroup) & 1) != 0;
      if (thread % kGroup == 0) {
        p.fired[neuron(thread) / kGroup] = static_cast<uint16_t>(mask);
      }
    }
    if (blockIdx.x == 0 && thread == 0 && count() % 2 == 1) p.fired[count()] = 0;
    const uint32_t ballot = __ballot_sync(~0u, mine);
    if (lane == 0) fired.warp_counts[thread / 32] = __popc(ballot);
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread / 32) before += fired.warp_counts[warp];
      total += fired.warp_counts[warp];
    }
    if (mine) {
      fired.list[before + __popc(ballot & ((1u << lane) - 1))] = static_cast<uint16_t>(thread);
      sm90::bulk_prefetch(p.w_down + neuron(thread) * p.input.width,
                          static_cast<uint32_t>(p.input.width) * 2);
    }
    __syncthreads();
    return total;
  }

  __device__ void store(int position, int total, int token, float up) const {
    if (position >= total) return;
    const int at = fired.list[position];
    const float g = __bfloat162float(fired.gate[at][token]);
    p.h[neuron(at) * kMaxTokens + token] = __float2bfloat16(g == 0.0f ? 0.0f : g * up);
  }
};

__global__ void __launch_bounds__(kThreads, kResident)
    few_rows_sparse_gate_up_sm90_kernel(const __grid_constant__ SparseGateUp p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Shared shared;
  __shared__ Fired fired;
  SparseGroups groups{p, fired};
  Product product(p.input, shared, memory);
  product.run(
      groups.count(), [&](int group, int pair) { return groups.rows(group, pair); },
      [&](int group, const Sums& sums) { groups.finish(group, sums); });
  const int thread = static_cast<int>(threadIdx.x), pair = thread % 32 / 4;
  if (p.activity != nullptr && thread < kFinishers && thread % 32 == 0) {
    if (groups.nnz > 0) {
      atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(groups.nnz));
    }
    if (blockIdx.x == 0 && thread == 0) {
      atomicAdd(&p.activity->tokens, static_cast<unsigned long long>(p.input.tokens));
    }
  }
  const int total = groups.list();
  for (int base = 0; base < total; base += kGroup) {
    Sums up{thread % kPairs, thread / kPairs, 1.0f, 1.0f};
    if (p.w_up != nullptr) {
      const auto row = [&](int position) {
        return position < total ? p.w_up + groups.neuron(fired.list[position]) * p.input.width
                                : nullptr;
      };
      up = product.extra({row(base + pair), row(base + pair + kPairs)});
    }
    if (thread >= kFinishers) continue;
    groups.store(base + up.pair, total, up.token, up.low);
    groups.store(base + up.pair + kPairs, total, up.token, up.high);
  }
}

}  // namespace

cudaError_t launch_sparse_gate_up_sm90(const SparseGateUp& problem, cudaStream_t stream) {
  if (problem.ffn % 8 != 0) return cudaErrorInvalidValue;
  return launch_product(few_rows_sparse_gate_up_sm90_kernel,
                        static_cast<int>((problem.ffn + kGroup - 1) / kGroup), kMaxGroups, problem,
                        stream);
}

}  // namespace twell::few_rows
