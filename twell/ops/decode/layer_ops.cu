// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/ops/decode/layer_ops_product.cuh"

namespace twell::layer_ops {
namespace {

// max(0, .), rounded to bf16; NaN stays.
__device__ float relu(float value) {
  return __bfloat162float(__float2bfloat16(value < 0.0f ? 0.0f : value));
}

// Groups are 16 columns.
struct LinearGroups {
  const Linear& p;
  __host__ __device__ int count() const { return static_cast<int>((p.cols + kGroup - 1) / kGroup); }
  __device__ const __nv_bfloat16* row(int64_t column) const {
    return column < p.cols ? p.w + column * p.input.width : nullptr;
  }
  __device__ Rows rows(int group, int pair) const {
    const int64_t column = int64_t{group} * kGroup + pair;
    return {row(column), row(column + kPairs)};
  }
  __device__ void store(int token, int64_t column, float value) const {
    if (column >= p.cols) return;
    const int64_t at = token * p.cols + column;
    if (p.residual != nullptr) value += __bfloat162float(p.residual[at]);
    if (p.f32_out) {
      static_cast<float*>(p.y)[at] = value;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(value);
    }
  }
  __device__ void finish(int group, const Sums& sums) const {
    if (sums.token >= p.input.tokens) return;
    const int64_t column = int64_t{group} * kGroup + sums.pair;
    store(sums.token, column, sums.low);
    store(sums.token, column + kPairs, sums.high);
  }
  __device__ void done() const {}
};

// Groups are eight pairs of a rotation, of one head: columns j and j + hd / 2.
struct QkvGroups {
  const Qkv& p;
  __host__ __device__ int count() const {
    return static_cast<int>((p.heads + 2 * p.kv_heads) * p.head_dim / kGroup);
  }
  struct Place {
    int head, first;  // of all H + 2 H_kv; first column within the head
  };
  __device__ Place place(int group) const {
    const int groups = static_cast<int>(p.head_dim) / kGroup;  // of a head
    return {group / groups, group % groups * kPairs};
  }
  __device__ int half() const { return static_cast<int>(p.head_dim) / 2; }
  __device__ int64_t column(const Place& place, int pair) const {
    return place.head * p.head_dim + place.first + pair;
  }
  __device__ Rows rows(int group, int pair) const {
    const int64_t low = column(place(group), pair);
    return {p.w + low * p.input.width, p.w + (low + half()) * p.input.width};
  }
  // Where a head's values of a token go.
  __device__ __nv_bfloat16* target(int head, int token) const {
    if (head < p.heads) return p.q + token * p.q_stride + head * p.head_dim;
    const bool key = head < p.heads + p.kv_heads;
    const int64_t kv_head = head - p.heads - (key ? 0 : p.kv_heads);
    return (key ? p.keys : p.values) + (p.cache_rows[token] * p.kv_heads + kv_head) * p.head_dim;
  }
  __device__ void finish(int group, const Sums& sums) const {
    if (sums.token >= p.input.tokens) return;
    const Place at = place(group);
    float low = sums.low, high = sums.high;
    if (p.bias != nullptr) {
      low += __bfloat162float(p.bias[column(at, sums.pair)]);
      high += __bfloat162float(p.bias[column(at, sums.pair) + half()]);
    }
    if (at.head < p.heads + p.kv_heads) {
      const int64_t entry = int64_t{p.positions[sums.token]} * half() + at.first + sums.pair;
      const float c = p.cos[entry], s = p.sin[entry];
      const float rotated = low * c - high * s;
      high = high * c + low * s;
      low = rotated;
    }
    __nv_bfloat16* to = target(at.head, sums.token) + at.first + sums.pair;
    to[0] = __float2bfloat16(low);
    to[half()] = __float2bfloat16(high);
  }
  __device__ void done() const {}
};

// What a CTA saw fire, counted by its first 64 threads; called by all of a warp.
__device__ void add_activity(const GateUp& p, int count) {
  if (p.activity == nullptr || threadIdx.x >= kPairs * kMaxTokens) return;
  const int total = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 != 0) return;
  if (total > 0) atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(total));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&p.activity->tokens, static_cast<unsigned long long>(p.input.tokens));
  }
}

// Groups are eight neurons.
struct GateUpGroups {
  const GateUp& p;
  int nnz = 0;
  __host__ __device__ int count() const { return static_cast<int>(p.ffn / kPairs); }
  __device__ Rows rows(int group, int pair) const {
    const int64_t neuron = int64_t{group} * kPairs + pair;
    return {p.w_gate + neuron * p.input.width, p.w_up + neuron * p.input.width};
  }
  __device__ void finish(int group, const Sums& sums) {
    if (sums.token >= p.input.tokens) return;
    const float g = relu(sums.low);
    const bool fires = !(g == 0.0f);
    p.h[sums.token * p.ffn + int64_t{group} * kPairs + sums.pair] =
        __float2bfloat16(fires ? g * sums.high : 0.0f);
    nnz += fires;
  }
  __device__ void done() const { add_activity(p, nnz); }
};

// Without a gate: 16 neurons.
struct HiddenGroups {
  const GateUp& p;
  int nnz = 0;
  __host__ __device__ int count() const { return static_cast<int>((p.ffn + kGroup - 1) / kGroup); }
  __device__ Rows rows(int group, int pair) const {
    const int64_t neuron = int64_t{group} * kGroup + pair;
    const __nv_bfloat16* low = p.w_up + neuron * p.input.width;
    return {low, neuron + kPairs < p.ffn ? low + kPairs * p.input.width : nullptr};
  }
  __device__ void finish(int group, const Sums& sums) {
    if (sums.token >= p.input.tokens) return;
    const float low = relu(sums.low), high = relu(sums.high);
    const int64_t neuron = int64_t{group} * kGroup + sums.pair;
    __nv_bfloat16* to = p.h + sums.token * p.ffn + neuron;
    to[0] = __float2bfloat16(low);
    nnz += !(low == 0.0f);
    if (neuron + kPairs >= p.ffn) return;
    to[kPairs] = __float2bfloat16(high);
    nnz += !(high == 0.0f);
  }
  __device__ void done() const { add_activity(p, nnz); }
};

template <typename Groups, typename Problem>
__global__ void __launch_bounds__(kThreads, kResident)
    layer_ops_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Shared shared;
  Groups groups{problem};
  Product product(problem.input, shared, memory);
  product.run(
      groups.count(), [&](int group, int pair) { return groups.rows(group, pair); },
      [&](int group, const Sums& sums) { groups.finish(group, sums); });
  groups.done();
}

template <typename Groups, typename Problem>
cudaError_t launch(const Problem& problem, cudaStream_t stream) {
  const int groups = Groups{problem}.count();
  return launch_product(layer_ops_kernel<Groups, Problem>, groups, std::max(groups, 1), problem,
                        stream);
}

}  // namespace

int64_t max_tokens(int64_t width) {
  int device = 0, most = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  constexpr int64_t kOther = 16 * 1024;  // of the kernels' own, and what the driver keeps
  return std::clamp<int64_t>((most - kRingBytes - kOther) / x_pitch(width), 0, kMaxTokens);
}

cudaError_t launch_linear(const Linear& problem, cudaStream_t stream) {
  return launch<LinearGroups>(problem, stream);
}

cudaError_t launch_qkv(const Qkv& problem, cudaStream_t stream) {
  if (problem.head_dim % kGroup != 0) return cudaErrorInvalidValue;
  return launch<QkvGroups>(problem, stream);
}

cudaError_t launch_gate_up(const GateUp& problem, cudaStream_t stream) {
  if (problem.ffn % kPairs != 0) return cudaErrorInvalidValue;
  return problem.w_gate == nullptr ? launch<HiddenGroups>(problem, stream)
                                   : launch<GateUpGroups>(problem, stream);
}

}  // namespace twell::layer_ops
