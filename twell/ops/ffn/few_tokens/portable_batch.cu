// SPDX-License-Identifier: Apache-2.0
// Up to 32 tokens on every GPU of compute capability 8.0 and later, by mma.sync.
//   gate_up   a CTA makes h of 16 or 32 neurons for all tokens: its warps share the columns of x,
//             load weights from memory straight into the operands of products and add their parts
//             up in shared memory. Rows of w_up are read for neurons active for any token
//   down      a CTA makes 32 columns of y: it lists the active neurons in order, and its warps
//             take 16 of them each in turn
// Bound by reading the first weight once, and the rows of active neurons of the others.
//
// A product m16n8k16 does not care which columns its k are, as long as both operands agree: lane
// 4 g + q loads the 16 bytes of columns 32 i + 8 q on, of which each half are its values of k in
// one product. In `down` k are neurons, whose rows and values of h a lane loads side by side and
// interleaves in pairs.
#include <algorithm>
#include <cstdint>

#include "twell/base/error.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/gather.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell {
namespace portable_batch {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlots = kWarps / 2;  // parts of sums that stand in shared memory at a time

struct Params {
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* first;   // [F, D] w_gate, or w_up without a gate
  const __nv_bfloat16* up;      // [F, D], or null: no gate
  const __nv_bfloat16* w_down;  // [F, D]
  __nv_bfloat16* hidden;        // [F, 8 kTiles] h of active neurons; other rows are not written
  uint32_t* active;             // [F / 32] a bit per neuron
  __nv_bfloat16* y;             // [M, D]
  ActivityCuda* activity;
  int tokens, width, ffn;
  bool add, squared, up_relu;
  uint32_t cut;
};

// Keeps its place before the loads of weights, so that x is there when they arrive.
__device__ __forceinline__ uint4 load_x(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// Loads 8 bytes as gpu::load_once16() does 16.
__device__ __forceinline__ uint2 load_weights8(const __nv_bfloat16* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from));
  return v;
}

// Adds up the warps' `Count` accumulators. sums[i][lane] is the sum of accumulator i of that lane
// over kSlots slots, in order. Contains barriers, the last of them behind the writes.
template <int Count>
struct Parts {
  float of[kSlots][Count][32];

  __device__ __forceinline__ void gather(const float* acc) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (warp >= kSlots) {
#pragma unroll
      for (int i = 0; i < Count; ++i) of[warp - kSlots][i][lane] = acc[i];
    }
    __syncthreads();
    if (warp < kSlots) {
#pragma unroll
      for (int i = 0; i < Count; ++i) of[warp][i][lane] += acc[i];
    }
    __syncthreads();
  }
  __device__ __forceinline__ float sum(int i, int lane) const {
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) sum += of[slot][i][lane];
    return sum;
  }
};

// acc = this warp's part of the products of 16 kRows rows of a weight with 8 kTiles tokens. Rows
// without a bit in `rows` are 0 and not read.
template <int kRows, int kTiles, int kAhead>
__device__ __forceinline__ void multiply(float (&acc)[kRows][kTiles][4], const Params& p,
                                         const __nv_bfloat16* weight, uint32_t rows) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = p.width / 8;
  const int group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[r][t][k] = 0.0f;
    }
  }
  const auto* x = reinterpret_cast<const uint4*>(p.x) + int64_t{group} * pieces;
  const auto* w_rows = reinterpret_cast<const uint4*>(weight) + int64_t{group} * pieces;
  const uint32_t mine = rows >> group;
#pragma unroll 1
  for (int base = warp * 4; base < pieces; base += kWarps * 4 * kAhead) {
    uint4 w[kAhead][kRows][2], b[kAhead][kTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = base + kWarps * 4 * i + quad;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        b[i][t] = piece < pieces && 8 * t + group < p.tokens
                      ? load_x(x + int64_t{8 * t} * pieces + piece)
                      : uint4{};
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = base + kWarps * 4 * i + quad;
#pragma unroll
      for (int r = 0; r < 2 * kRows; ++r) {
        w[i][r / 2][r % 2] = piece < pieces && (mine >> 8 * r & 1) != 0
                                 ? gpu::load_once16(w_rows + int64_t{8 * r} * pieces + piece)
                                 : uint4{};
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const uint4 &low = w[i][r][0], &high = w[i][r][1], &of = b[i][t];
          gpu::mma_16x8x16(acc[r][t], low.x, high.x, low.y, high.y, of.x, of.y);
          gpu::mma_16x8x16(acc[r][t], low.z, high.z, low.w, high.w, of.z, of.w);
        }
      }
    }
  }
}

// kAhead: blocks of 32 columns of a warp whose loads are in flight.
template <int kRows, int kTiles, int kAhead>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 3 : 2)
    gate_up_kernel(const __grid_constant__ Params p) {
  constexpr int kCount = kRows * kTiles * 4, kValues = kCount * 32;
  __shared__ Parts<kCount> parts;
  __shared__ uint16_t gates[kValues];
  __shared__ uint32_t active;
  __shared__ int count;
  const int first_neuron = blockIdx.x * 16 * kRows, neurons = min(p.ffn - first_neuron, 16 * kRows);
  if (threadIdx.x == 0) active = count = 0;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();

  // Value i of a CTA's: accumulator i / 32 of lane i % 32.
  const auto neuron_of = [](int i) {
    return i / (kTiles * 128) * 16 + i / 64 % 2 * 8 + i % 32 / 4;
  };
  const auto token_of = [](int i) { return i / 128 % kTiles * 8 + i % 4 * 2 + i / 32 % 2; };
  float acc[kRows][kTiles][4];
  multiply<kRows, kTiles, kAhead>(acc, p, p.first + int64_t{first_neuron} * p.width,
                                  neurons == 32 ? ~0u : (1u << neurons) - 1);
  parts.gather(&acc[0][0][0]);
  uint32_t of_warp = 0;
  int fired = 0;
  for (int i = threadIdx.x; i < kValues; i += kThreads) {
    const uint32_t bits = gpu::above(gpu::relu_bf16(parts.sum(i / 32, i % 32)), p.cut);
    // Neurons past the last one have weights of 0, with which NaN in x makes NaN.
    const bool fires = bits != 0 && token_of(i) < p.tokens && neuron_of(i) < neurons;
    gates[i] = fires ? static_cast<uint16_t>(bits) : 0;
    of_warp |= __reduce_or_sync(~0u, fires ? 1u << neuron_of(i) : 0u);
    fired += __popc(__ballot_sync(~0u, fires));
  }
  if (threadIdx.x % 32 == 0 && fired > 0) {
    atomicOr(&active, of_warp);
    atomicAdd(&count, fired);
  }
  __syncthreads();
  const uint32_t rows = active;
  if (threadIdx.x == 0) {
    if (kRows == 1) {
      reinterpret_cast<uint16_t*>(p.active)[blockIdx.x] = static_cast<uint16_t>(rows);
    } else {
      p.active[blockIdx.x] = rows;
    }
    if (p.activity != nullptr) {
      if (count > 0) atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(count));
      if (blockIdx.x == 0) {
        atomicAdd(&p.activity->tokens, static_cast<unsigned long long>(p.tokens));
      }
    }
  }
  if (rows == 0) return;
  if (p.up != nullptr) {
    multiply<kRows, kTiles, kAhead>(acc, p, p.up + int64_t{first_neuron} * p.width, rows);
    parts.gather(&acc[0][0][0]);
  }
  for (int i = threadIdx.x; i < kValues; i += kThreads) {
    const int neuron = neuron_of(i);
    if ((rows >> neuron & 1) == 0) continue;
    float h = 0.0f;
    if (gates[i] != 0) {
      const float g = gpu::low_half(gates[i]);
      h = g * (p.up != nullptr ? gpu::relu_if(p.up_relu, parts.sum(i / 32, i % 32)) : 1.0f);
      if (p.squared) h *= g;
    }
    p.hidden[int64_t{first_neuron + neuron} * (8 * kTiles) + token_of(i)] = __float2bfloat16(h);
  }
}

// --- down ---

constexpr int kColumns = 32;             // of a CTA, four of a lane
constexpr int kSegment = kThreads * 32;  // neurons that are listed at a time

// h of one neuron for kTiles tokens.
template <int kTiles>
struct Hidden {
  alignas(2 * kTiles) uint16_t of[kTiles];
};

// Value j of two neurons, as a pair.
template <int kTiles>
__device__ __forceinline__ uint32_t pair(const Hidden<kTiles>& low, const Hidden<kTiles>& high,
                                         int j) {
  return uint32_t{low.of[j]} | uint32_t{high.of[j]} << 16;
}

// y of lane 4 g + q: columns 4 g + 2 t and the next, and tokens 2 q kTiles + j and (2 q + 1) kTiles
// + j, are the accumulators of product [t][j].
template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2) down_kernel(const __grid_constant__ Params p) {
  constexpr int kAhead = kTiles <= 2 ? 4 : 2, kCount = 2 * kTiles * 4;
  union Memory {
    uint16_t listed[kSegment];
    Parts<kCount> parts;
  };
  __shared__ Memory memory;
  __shared__ int scratch[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int column = blockIdx.x * kColumns + group * 4;
  const bool inside = column < p.width;
  float acc[2][kTiles][4] = {};
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  for (int begin = 0; begin < p.ffn; begin += kSegment) {
    const int left = p.ffn - begin - static_cast<int>(threadIdx.x) * 32;
    uint32_t fires = left > 0 ? p.active[begin / 32 + threadIdx.x] : 0;
    if (left > 0 && left < 32) fires &= (1u << left) - 1;
    int total;
    int at = gpu::block_scan<kThreads>(__popc(fires), scratch, total);  // contains barriers
    for (; fires != 0; fires &= fires - 1) {
      memory.listed[at++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(fires) - 1);
    }
    __syncthreads();
#pragma unroll 1
    for (int base = warp * 16; base < total; base += kWarps * 16 * kAhead) {
      uint2 w[kAhead][4];
      Hidden<kTiles> h[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int entry = base + kWarps * 16 * i + 4 * quad + k;
          const bool exists = entry < total;
          const int64_t neuron = begin + (exists ? memory.listed[entry] : 0);
          w[i][k] =
              exists && inside ? load_weights8(p.w_down + neuron * p.width + column) : uint2{};
          h[i][k] = {};
          if (exists) {
            h[i][k] = *reinterpret_cast<const Hidden<kTiles>*>(p.hidden + neuron * (8 * kTiles) +
                                                               group * kTiles);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + kWarps * 16 * i >= total) break;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint32_t w0 = t == 0 ? w[i][0].x : w[i][0].y, w1 = t == 0 ? w[i][1].x : w[i][1].y;
          const uint32_t w2 = t == 0 ? w[i][2].x : w[i][2].y, w3 = t == 0 ? w[i][3].x : w[i][3].y;
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            gpu::mma_16x8x16(acc[t][j], __byte_perm(w0, w1, 0x5410), __byte_perm(w0, w1, 0x7632),
                             __byte_perm(w2, w3, 0x5410), __byte_perm(w2, w3, 0x7632),
                             pair(h[i][0], h[i][1], j), pair(h[i][2], h[i][3], j));
          }
        }
      }
    }
    __syncthreads();  // the list may be overwritten
  }
  memory.parts.gather(&acc[0][0][0]);
  for (int i = threadIdx.x; i < 2 * kTiles * 64; i += kThreads) {
    const int t = i / (kTiles * 64), j = i / 64 % kTiles, odd = i / 32 % 2, of = i % 32;
    const int token = (of % 4 * 2 + odd) * kTiles + j;
    const int to = blockIdx.x * kColumns + of / 4 * 4 + 2 * t;
    if (token >= p.tokens || to >= p.width) continue;
    const int sum = (t * kTiles + j) * 4 + odd;
    float low = memory.parts.sum(sum, of), high = memory.parts.sum(sum + 2, of);
    auto* out = reinterpret_cast<uint32_t*>(p.y + int64_t{token} * p.width + to);
    if (p.add) {
      const float2 before = gpu::to_floats(*out);
      low += before.x;
      high += before.y;
    }
    *out = gpu::bf16x2(low, high);
  }
}

template <int kRows, int kTiles, int kAhead>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>((params.ffn + 16 * kRows - 1) / (16 * kRows));
  const cudaError_t status = gpu::launch_dependent(gate_up_kernel<kRows, kTiles, kAhead>,
                                                   dim3(ctas), kThreads, 0, stream, params);
  if (status != cudaSuccess) return status;
  const auto columns = static_cast<unsigned>((params.width + kColumns - 1) / kColumns);
  return gpu::launch_dependent(down_kernel<kTiles>, dim3(columns), kThreads, 0, stream, params);
}

}  // namespace
}  // namespace portable_batch

void portable_batch_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                             FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn, /*portable=*/true);
  TWELL_CHECK(problem.tokens >= 0 && problem.tokens <= kMaxPortableBatch &&
                  problem.ffn <= workspace.max_ffn_ && problem.norm == nullptr,
              "portable-batch: [{}, {}]{} in a workspace for [{}, {}]", problem.tokens, problem.ffn,
              problem.norm == nullptr ? "" : " with a norm", kMaxPortableBatch, workspace.max_ffn_);
  if (problem.tokens == 0) return;
  const bool gated = problem.w_gate != nullptr;
  const portable_batch::Params params{.x = problem.x,
                                      .first = gated ? problem.w_gate : problem.w_up,
                                      .up = gated ? problem.w_up : nullptr,
                                      .w_down = problem.w_down,
                                      .hidden = workspace.hidden_.data(),
                                      .active = workspace.active_.data(),
                                      .y = problem.y,
                                      .activity = problem.activity,
                                      .tokens = static_cast<int>(problem.tokens),
                                      .width = static_cast<int>(problem.width),
                                      .ffn = static_cast<int>(problem.ffn),
                                      .add = problem.add,
                                      .squared = problem.squared,
                                      .up_relu = problem.up_relu,
                                      .cut = problem.cut};
  const auto launch = problem.tokens <= 8    ? portable_batch::launch<1, 1, 4>
                      : problem.tokens <= 16 ? portable_batch::launch<1, 2, 4>
                                             : portable_batch::launch<2, 4, 2>;
  TWELL_CUDA_CHECK(launch(params, ctx.stream()));
}

}  // namespace twell
