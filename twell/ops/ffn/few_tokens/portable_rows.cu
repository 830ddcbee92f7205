// SPDX-License-Identifier: Apache-2.0
// One to eight tokens on every GPU of compute capability 8.0 and later: a warp per neuron.
//   gate_up   a warp multiplies the rows of two neurons of the first weight with all tokens, and
//             the row of w_up of each of them that is active for any token; writes h [F, tokens]
//   down      a CTA makes 32 columns of y: it lists the neurons whose h is not 0, in order, and
//             each group of four lanes adds up every 64th of them
// Bound by reading the first weight once, and the rows of active neurons of the others.
#include <algorithm>
#include <cstdint>

#include "twell/base/error.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/gather.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/scan.cuh"
#include "twell/ops/ffn/few_tokens/batch_ffn_cuda.h"
#include "twell/ops/ffn/gate/gate_gemm_cuda.h"

namespace twell {
namespace portable_rows {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Params {
  const __nv_bfloat16* x;       // [M, D]
  const __nv_bfloat16* first;   // [F, D] w_gate, or w_up without a gate
  const __nv_bfloat16* up;      // [F, D], or null: no gate
  const __nv_bfloat16* w_down;  // [F, D]
  __nv_bfloat16* hidden;        // [F, tokens rounded up to a power of two]
  __nv_bfloat16* y;             // [M, D]
  const __nv_bfloat16* norm;    // [D] or null
  ActivityCuda* activity;
  float eps;
  int tokens, width, ffn;
  bool add, squared, up_relu;
  uint32_t cut;
};

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// The products of `Rows` rows of a weight with all tokens, in every lane. What stands past the last
// token repeats it.
template <int Rows, int Tokens>
__device__ __forceinline__ void multiply(float (&sums)[Rows][Tokens],
                                         const uint4* const (&rows)[Rows], const uint4* x,
                                         int pieces, int tokens) {
  constexpr int kAhead = 4;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int m = 0; m < Tokens; ++m) sums[r][m] = 0.0f;
  }
#pragma unroll 1
  for (int base = threadIdx.x % 32; base < pieces; base += 32 * kAhead) {
    uint4 w[kAhead][Rows];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        w[i][r] = base + 32 * i < pieces ? gpu::load_once16(rows[r] + base + 32 * i) : uint4{};
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int piece = base + 32 * i;
      if (piece >= pieces) break;
#pragma unroll
      for (int m = 0; m < Tokens; ++m) {
        const uint4 values = x[min(m, tokens - 1) * pieces + piece];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 a = gpu::to_floats(gpu::word(values, k));
#pragma unroll
          for (int r = 0; r < Rows; ++r) {
            const float2 b = gpu::to_floats(gpu::word(w[i][r], k));
            sums[r][m] = fmaf(a.x, b.x, fmaf(a.y, b.y, sums[r][m]));
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int m = 0; m < Tokens; ++m) sums[r][m] = warp_sum(sums[r][m]);
  }
}

// x, normed where there is a norm, into shared memory.
__device__ __forceinline__ void load_x(const Params& p, uint4* x, int pieces) {
  const int lane = threadIdx.x % 32;
  for (int m = threadIdx.x / 32; m < p.tokens; m += kWarps) {
    const auto* from = reinterpret_cast<const uint4*>(p.x) + int64_t{m} * pieces;
    float squares = 0.0f;
    for (int i = lane; i < pieces; i += 32) {
      const uint4 values = from[i];
      x[m * pieces + i] = values;
      squares += gpu::sum_of_squares(values);
    }
    if (p.norm == nullptr) continue;
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.width) + p.eps);
    for (int i = lane; i < pieces; i += 32) {
      const uint4 values = x[m * pieces + i];
      const uint4 by = __ldg(reinterpret_cast<const uint4*>(p.norm) + i);
      x[m * pieces + i] = {gpu::scaled(values.x, by.x, factor), gpu::scaled(values.y, by.y, factor),
                           gpu::scaled(values.z, by.z, factor),
                           gpu::scaled(values.w, by.w, factor)};
    }
  }
  __syncthreads();
}

template <int Tokens>
__global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ int counts[kWarps];
  auto* x = reinterpret_cast<uint4*>(memory);
  const int pieces = p.width / 8, lane = threadIdx.x % 32;
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  load_x(p, x, pieces);
  int count = 0;
  constexpr int kRows = 2;
  for (int n = (blockIdx.x * kWarps + threadIdx.x / 32) * kRows; n < p.ffn;
       n += gridDim.x * kWarps * kRows) {
    const auto* first = reinterpret_cast<const uint4*>(p.first) + int64_t{n} * pieces;
    float sums[kRows][Tokens];
    multiply<kRows, Tokens>(sums, {first, first + pieces}, x, pieces, p.tokens);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float g[Tokens], u[1][Tokens];
      bool active = false;
#pragma unroll
      for (int m = 0; m < Tokens; ++m) {
        const uint32_t bits = gpu::above(gpu::relu_bf16(sums[r][m]), p.cut);
        const bool fires = bits != 0 && m < p.tokens;
        active |= fires;
        count += fires;
        g[m] = fires ? gpu::low_half(bits) : 0.0f;
        u[0][m] = 1.0f;
      }
      if (active && p.up != nullptr) {
        const auto* up = reinterpret_cast<const uint4*>(p.up) + int64_t{n + r} * pieces;
        multiply<1, Tokens>(u, {up}, x, pieces, p.tokens);
      }
      if (lane < Tokens) {
        float h = 0.0f;
#pragma unroll
        for (int m = 0; m < Tokens; ++m) {
          if (lane != m || g[m] == 0.0f) continue;
          h = gpu::relu_if(p.up_relu, u[0][m]) * g[m];
          if (p.squared) h *= g[m];
        }
        p.hidden[int64_t{n + r} * Tokens + lane] = __float2bfloat16(h);
      }
    }
  }
  if (p.activity == nullptr) return;
  if (lane == 0) counts[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int sum = 0;
  for (const int of_warp : counts) sum += of_warp;
  if (sum > 0) atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(sum));
  if (blockIdx.x == 0) {
    atomicAdd(&p.activity->tokens, static_cast<unsigned long long>(p.tokens));
  }
}

// --- down ---

constexpr int kColumns = 32;                     // of a CTA: four lanes of 16 bytes
constexpr int kPerThread = 32;                   // neurons that a thread looks at in a segment
constexpr int kSegment = kThreads * kPerThread;  // neurons
constexpr int kGroups = kThreads / 4;

template <int Tokens>
struct Values {
  alignas(2 * Tokens) __nv_bfloat16 of[Tokens];
};

template <int Tokens>
__global__ void __launch_bounds__(kThreads) down_kernel(const __grid_constant__ Params p) {
  __shared__ uint16_t listed[kSegment];
  __shared__ int scratch[kWarps];
  __shared__ float sums[kWarps][Tokens][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kColumns + lane % 4 * 8;
  const bool inside = column < p.width;
  float acc[Tokens][8] = {};
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const auto* hidden = reinterpret_cast<const Values<Tokens>*>(p.hidden);
  for (int begin = 0; begin < p.ffn; begin += kSegment) {
    // Bit i: neuron begin + 32 thread + i. F is a multiple of 8, so eight neurons exist or none.
    uint32_t fires = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; i += 8) {
      const int neuron = begin + threadIdx.x * kPerThread + i;
      if (neuron >= p.ffn) break;
      const auto* from = reinterpret_cast<const uint4*>(hidden + neuron);  // 8 x Tokens values
      uint4 values[Tokens];
#pragma unroll
      for (int k = 0; k < Tokens; ++k) values[k] = from[k];
#pragma unroll
      for (int k = 0; k < Tokens; ++k) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint32_t pair = gpu::word(values[k], word);
          const int value = k * 8 + word * 2;
          fires |= static_cast<uint32_t>((pair & 0x7fff) != 0) << (i + value / Tokens);
          fires |= static_cast<uint32_t>((pair & 0x7fff0000) != 0) << (i + (value + 1) / Tokens);
        }
      }
    }
    int total;
    int at = gpu::block_scan<kThreads>(__popc(fires), scratch, total);  // contains barriers
    for (uint32_t left = fires; left != 0; left &= left - 1) {
      listed[at++] = static_cast<uint16_t>(threadIdx.x * kPerThread + __ffs(left) - 1);
    }
    __syncthreads();
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int i = threadIdx.x / 4; i < total; i += kGroups * kAhead) {
      uint4 w[kAhead];
      Values<Tokens> h[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const bool exists = i + j * kGroups < total;
        const int neuron = begin + (exists ? listed[i + j * kGroups] : 0);
        w[j] = exists && inside ? gpu::load_once16(reinterpret_cast<const uint4*>(
                                      p.w_down + int64_t{neuron} * p.width + column))
                                : uint4{};
        h[j] = hidden[neuron];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + j * kGroups >= total) break;
#pragma unroll
        for (int m = 0; m < Tokens; ++m) {
          const float value = __bfloat162float(h[j].of[m]);
          if (value == 0.0f) continue;  // of an infinite weight the product would be NaN
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float2 of = gpu::to_floats(gpu::word(w[j], k));
            acc[m][2 * k] = fmaf(value, of.x, acc[m][2 * k]);
            acc[m][2 * k + 1] = fmaf(value, of.y, acc[m][2 * k + 1]);
          }
        }
      }
    }
    __syncthreads();  // the list may be overwritten
  }
  // Adds up the eight groups of a warp, then the warps.
#pragma unroll
  for (int m = 0; m < Tokens; ++m) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float sum = acc[m][k];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < 4) sums[warp][m][lane * 8 + k] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Tokens * kColumns / 2; i += kThreads) {
    const int m = i / (kColumns / 2), pair = i % (kColumns / 2) * 2;
    const int to = blockIdx.x * kColumns + pair;
    if (m >= p.tokens || to >= p.width) continue;
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      low += sums[from][m][pair];
      high += sums[from][m][pair + 1];
    }
    auto* out = reinterpret_cast<uint32_t*>(p.y + int64_t{m} * p.width + to);
    if (p.add) {
      const float2 before = gpu::to_floats(*out);
      low += before.x;
      high += before.y;
    }
    *out = gpu::bf16x2(low, high);
  }
}

template <int Tokens>
cudaError_t launch(const Params& params, int multiprocessors, cudaStream_t stream) {
  const auto gate_up = gate_up_kernel<Tokens>;
  cudaError_t status = gpu::allow_most_shared_memory(gate_up);
  if (status != cudaSuccess) return status;
  // Every CTA gets the same number of rounds.
  const int pairs = params.ffn / 2, wave = 2 * multiprocessors * kWarps;
  const int rounds = (pairs + wave - 1) / wave;
  const int ctas = (pairs + rounds * kWarps - 1) / (rounds * kWarps);
  const auto bytes = static_cast<uint32_t>(params.tokens * params.width * 2);
  status = gpu::launch_dependent(gate_up, dim3(static_cast<unsigned>(ctas)), kThreads, bytes,
                                 stream, params);
  if (status != cudaSuccess) return status;
  const auto columns = static_cast<unsigned>((params.width + kColumns - 1) / kColumns);
  return gpu::launch_dependent(down_kernel<Tokens>, dim3(columns), kThreads, 0, stream, params);
}

}  // namespace
}  // namespace portable_rows

void portable_rows_ffn_cuda(CudaContext& ctx, const BatchFfnCuda& problem,
                            FewTokenWorkspace& workspace) {
  check_ffn_call(ctx, problem.width, problem.ffn, /*portable=*/true);
  TWELL_CHECK(problem.tokens >= 0 && problem.tokens <= 8 && problem.ffn <= workspace.max_ffn_,
              "portable-rows: [{}, {}] in a workspace for [8, {}]", problem.tokens, problem.ffn,
              workspace.max_ffn_);
  if (problem.tokens == 0) return;
  const bool gated = problem.w_gate != nullptr;
  const portable_rows::Params params{.x = problem.x,
                                     .first = gated ? problem.w_gate : problem.w_up,
                                     .up = gated ? problem.w_up : nullptr,
                                     .w_down = problem.w_down,
                                     .hidden = workspace.hidden_.data(),
                                     .y = problem.y,
                                     .norm = problem.norm,
                                     .activity = problem.activity,
                                     .eps = problem.eps,
                                     .tokens = static_cast<int>(problem.tokens),
                                     .width = static_cast<int>(problem.width),
                                     .ffn = static_cast<int>(problem.ffn),
                                     .add = problem.add,
                                     .squared = problem.squared,
                                     .up_relu = problem.up_relu,
                                     .cut = problem.cut};
  const auto launch = problem.tokens == 1   ? portable_rows::launch<1>
                      : problem.tokens == 2 ? portable_rows::launch<2>
                      : problem.tokens <= 4 ? portable_rows::launch<4>
                                            : portable_rows::launch<8>;
  TWELL_CUDA_CHECK(launch(params, ctx.multiprocessors(), ctx.stream()));
}

}  // namespace twell
