// SPDX-License-Identifier: Apache-2.0
// The skinny GEMM (skinny_gemm.cuh) as kernels of one product each. Two CTAs per SM, so that one
// works while the other waits, take groups round-robin. Weights pass through a ring of 16-byte
// slots in shared memory by cp.async; a thread reads only slots it filled itself, so that it waits
// for nothing but its own copies, and the ring never runs dry between groups. Both rings take less
// than half of the shared memory, so that the next kernel can fill its own while this one ends.
#include "twell/ops/skinny/layer_ops.h"

#include <algorithm>

#include "twell/base/reduce.cuh"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/ops/skinny/skinny_gemm.cuh"

namespace twell::layer_ops {
namespace {

using namespace skinny_gemm;

constexpr int kDepth = 5;             // blocks of a warp in flight
constexpr int kResident = 2;          // CTAs per SM
constexpr int kSlot = kThreads * 16;  // bytes between a thread's slots in the ring
static_assert(kRingBytes == kDepth * 2 * kSlot);

int64_t shared_bytes(const Input& input) {
  return kRingBytes + input.tokens * row_pitch(static_cast<int>(input.width));
}

struct Shared {
  float partial[2][kWarps][kGroup][kMaxTokens + 1];  // of two groups; padded against bank conflicts
  float squares[kWarps][kMaxTokens];
};

// A low and a high sum of one token and pair.
struct Sums {
  int pair, token;  // token may be past the last one
  float low, high;
};

// Stores n(x) in shared memory, padded with zeros to a whole block. All threads of the CTA call it.
__device__ __forceinline__ void stage_x(const Input& input, Shared& shared, uint8_t* x_shared) {
  const int thread = static_cast<int>(threadIdx.x), tokens = static_cast<int>(input.tokens);
  const int pieces = static_cast<int>(input.width) / 8;
  const int padded = (pieces + 3) / 4 * 4, pitch = row_pitch(static_cast<int>(input.width));
  const auto* x = reinterpret_cast<const uint4*>(input.x);
  // A thread's first piece of each token stays in its registers between the two passes.
  uint4 kept[kMaxTokens];
#pragma unroll
  for (int m = 0; m < kMaxTokens; ++m) {
    kept[m] = uint4{};
    if (m < tokens && thread < pieces) kept[m] = x[m * pieces + thread];
  }
  float inverse[kMaxTokens];
  if (input.norm != nullptr) {
#pragma unroll
    for (int m = 0; m < kMaxTokens; ++m) {
      if (m >= tokens) break;
      float squares = gpu::sum_of_squares(kept[m]);
      for (int at = thread + kThreads; at < pieces; at += kThreads) {
        squares += gpu::sum_of_squares(x[m * pieces + at]);
      }
      squares = warp_sum(squares);
      if (thread % 32 == 0) shared.squares[thread / 32][m] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kMaxTokens; ++m) {
      if (m >= tokens) break;
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += shared.squares[warp][m];
      inverse[m] = rsqrtf(total / static_cast<float>(input.width) + input.eps);
    }
  }
  for (int at = thread; at < padded; at += kThreads) {
    uint4 norm{};
    if (input.norm != nullptr && at < pieces) {
      norm = __ldg(reinterpret_cast<const uint4*>(input.norm) + at);
    }
#pragma unroll
    for (int m = 0; m < kMaxTokens; ++m) {
      if (m >= tokens) break;
      uint4 v = kept[m];
      if (at >= kThreads) v = at < pieces ? x[m * pieces + at] : uint4{};
      if (input.norm != nullptr) {
        v = {gpu::scaled(v.x, norm.x, inverse[m]), gpu::scaled(v.y, norm.y, inverse[m]),
             gpu::scaled(v.z, norm.z, inverse[m]), gpu::scaled(v.w, norm.w, inverse[m])};
      }
      *reinterpret_cast<uint4*>(x_shared + m * pitch + at * 16) = v;
    }
  }
  __syncthreads();
}

// The products of a CTA, as one of its threads takes part in them.
class Product {
 public:
  __device__ __forceinline__ Product(const Input& input, Shared& shared, uint8_t* memory)
      : input_(input),
        shared_(shared),
        blocks_(static_cast<int>(input.width)),
        x_shared_(memory + kRingBytes),
        slots_(gpu::smem_address(memory) + static_cast<uint32_t>(threadIdx.x) * 16) {
    const int width = static_cast<int>(input.width), lane = static_cast<int>(threadIdx.x) % 32;
    at_ = lane % 4 * 8;
    lane_end_ = min(blocks_.end, (width - at_ + kBlock - 1) / kBlock);
    const int token = lane / 4;
    x_ = token < input.tokens
             ? gpu::smem_address(x_shared_) + token * row_pitch(width) + lane % 4 * 16
             : 0;
  }

  // Multiplies all groups of this CTA, assigned round-robin: rows(group, pair) gives their weights;
  // the first 64 threads call finish(group, sums), one per pair and token.
  template <typename GroupRows, typename Finish>
  __device__ __forceinline__ void run(int groups, const GroupRows& rows, const Finish& finish) {
    const int pair = static_cast<int>(threadIdx.x) % 32 / 4, first = static_cast<int>(blockIdx.x),
              step = static_cast<int>(gridDim.x);
    int load_group = first, load_block = blocks_.begin;
    Rows load_rows = rows(first, pair);
    const auto load = [&](int slot) {
      if (load_group < groups && blocks_.begin < blocks_.end) {
        copy(load_rows, load_block, slot);
        if (++load_block == blocks_.end) {
          load_block = blocks_.begin;
          load_group += step;
          if (load_group < groups) load_rows = rows(load_group, pair);
        }
      }
      gpu::gathers_commit();  // one group of copies per slot, even an empty one
    };
    gpu::allow_next_kernel();
    if (!input_.constant_weights) gpu::wait_for_previous_kernel();
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) load(slot);
    if (input_.constant_weights) gpu::wait_for_previous_kernel();
    stage_x(input_, shared_, x_shared_);
    int slot = 0;
    for (int group = first; group < groups; group += step) {
      float acc[2][4] = {};
      for (int block = blocks_.begin; block < blocks_.end; ++block) {
        gpu::gathers_wait<kDepth - 1>();
        const uint32_t from = slots_ + slot * (2 * kSlot);
        multiply(acc, gpu::load_shared16(from), gpu::load_shared16(from + kSlot), block);
        load(slot);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
      }
      const Sums sums = add_up(acc);
      if (sums.token < kMaxTokens) finish(group, sums);
    }
    gpu::gathers_wait<0>();
  }

 private:
  __device__ __forceinline__ void copy(const Rows& rows, int block, int slot) const {
    const bool inside = block < lane_end_, low = inside && rows.low != nullptr,
               high = inside && rows.high != nullptr;
    const int k = block * kBlock + at_;
    const uint32_t to = slots_ + slot * (2 * kSlot);
    // Copies that are not valid read nothing, but need an address.
    gpu::gather16(to, low ? rows.low + k : input_.x, low);
    gpu::gather16(to + kSlot, high ? rows.high + k : input_.x, high);
  }

  __device__ __forceinline__ void multiply(float (&acc)[2][4], const uint4& low, const uint4& high,
                                           int block) const {
    uint4 x{};
    if (x_ != 0) x = gpu::load_shared16(x_ + block * (kBlock * 2));
    gpu::mma_16x8x16(acc[0], low.x, high.x, low.y, high.y, x.x, x.y);
    gpu::mma_16x8x16(acc[1], low.z, high.z, low.w, high.w, x.z, x.w);
  }

  // Adds the sums of all warps; the first 64 threads get theirs. All threads call it.
  __device__ __forceinline__ Sums add_up(const float (&acc)[2][4]) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    auto& partial = shared_.partial[parity_];
    parity_ ^= 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[thread / 32][lane / 4 + i / 2 * kPairs][lane % 4 * 2 + i % 2] = acc[0][i] + acc[1][i];
    }
    __syncthreads();  // the halves alternate: this one is reused after the next one
    Sums sums{thread % kPairs, thread / kPairs, 0.0f, 0.0f};
    if (sums.token >= kMaxTokens) return sums;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      sums.low += partial[from][sums.pair][sums.token];
      sums.high += partial[from][sums.pair + kPairs][sums.token];
    }
    return sums;
  }

  const Input& input_;
  Shared& shared_;
  const Blocks blocks_;  // of the width that this warp multiplies
  uint8_t* x_shared_;
  uint32_t slots_;  // this thread's first slot
  uint32_t x_;      // address of this lane's token, or 0 past the last one
  int lane_end_;    // end of the blocks that reach this lane: the last one may be short
  int at_;          // this lane's first value in a block
  int parity_ = 0;
};

// max(0, value) rounded to bf16; NaN stays NaN.
__device__ float relu(float value) {
  return __bfloat162float(__float2bfloat16(value < 0.0f ? 0.0f : value));
}
// The same where FATReLU's threshold is 0.
__device__ float cut_relu(float value, float threshold) {
  const float g = relu(value);
  return g <= threshold ? 0.0f : g;
}

// --- The operations: which rows a group has, and what becomes of its sums ---
// A group is 16 columns of y.
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

// A group is eight rotated pairs of one head: columns j and j + hd / 2.
struct QkvGroups {
  const Qkv& p;
  __host__ __device__ int count() const {
    return static_cast<int>((p.heads + 2 * p.kv_heads) * p.head_dim / kGroup);
  }
  struct Place {
    int head, first;  // of all H + 2 H_kv heads; first column within the head
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
  // Where a token's values of a head are stored.
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

// Adds the active neurons that the first 64 threads counted; whole warps call it.
__device__ void add_activity(const GateUp& p, int count) {
  if (p.activity == nullptr || threadIdx.x >= kPairs * kMaxTokens) return;
  const int total = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 != 0) return;
  if (total > 0) atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(total));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&p.activity->tokens, static_cast<unsigned long long>(p.input.tokens));
  }
}

// A group is eight neurons: rows of w_gate and of w_up.
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
    const float g = cut_relu(sums.low, p.threshold);
    const bool fires = !(g == 0.0f);
    p.h[sums.token * p.ffn + int64_t{group} * kPairs + sums.pair] = __float2bfloat16(
        fires ? (p.squared ? g * g : g) * gpu::relu_if(p.up_relu, sums.high) : 0.0f);
    nnz += fires;
  }
  __device__ void done() const { add_activity(p, nnz); }
};

// Without a gate, a group is 16 neurons.
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
    const float low = cut_relu(sums.low, p.threshold), high = cut_relu(sums.high, p.threshold);
    const int64_t neuron = int64_t{group} * kGroup + sums.pair;
    __nv_bfloat16* to = p.h + sums.token * p.ffn + neuron;
    to[0] = __float2bfloat16(p.squared ? low * low : low);
    nnz += !(low == 0.0f);
    if (neuron + kPairs >= p.ffn) return;
    to[kPairs] = __float2bfloat16(p.squared ? high * high : high);
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

// Two CTAs per SM, or as many as there are groups if these are fewer.
template <typename Groups, typename Problem>
cudaError_t launch(const Problem& problem, cudaStream_t stream) {
  const auto kernel = layer_ops_kernel<Groups, Problem>;
  const Input& input = problem.input;
  if (input.tokens < 1 || input.tokens > kMaxTokens || input.width <= 0 || input.width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  int multiprocessors = 0;
  cudaError_t status = gpu::device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount);
  if (status == cudaSuccess) status = gpu::allow_most_shared_memory(kernel);
  if (status != cudaSuccess) return status;
  const int ctas = std::max(std::min(Groups{problem}.count(), kResident * multiprocessors), 1);
  return gpu::launch_dependent(kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                               static_cast<uint32_t>(shared_bytes(input)), stream, problem);
}

}  // namespace

int64_t max_tokens(int64_t width) {
  int most = 0;
  if (gpu::device_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin) != cudaSuccess) {
    return 0;
  }
  return row_tokens(most, width);
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
