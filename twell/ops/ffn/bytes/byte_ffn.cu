// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/reduce.cuh"
#include "twell/format/byte_rows.cuh"
#include "twell/ops/ffn/bytes/byte_ffn_cuda.h"
#include "twell/ops/ffn/dense/activate.cuh"
#include "twell/ops/matmul/byte_linear_cuda.h"

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// CTAs, four per SM of an H200, take tokens in turn, so that there are few atomic additions.
constexpr int64_t kMostCtas = 528;

struct QuantiseHidden {
  const __nv_bfloat16* g;  // [M, F], before the activation
  const __nv_bfloat16* u;  // [M, F] or null
  uint8_t* values;         // [M, F] e4m3, rows 2 F bytes apart; may be g, whose rows are read first
  float* scales;           // [M]
  int32_t* row_nnz;        // [M] or null
  ActivityCuda* activity;  // or null
  int64_t tokens;
  int pieces;       // of 8 values in a row
  float threshold;  // of FATReLU
};

__device__ __forceinline__ float2 as_floats(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// h is rounded to bf16 and kept in shared memory until its scale is known.
template <Activation kActivation>
__global__ void __launch_bounds__(kThreads) quantise_hidden_kernel(QuantiseHidden p) {
  extern __shared__ uint4 row_of_h[];  // [pieces]
  __shared__ float largest_of[kWarps];
  __shared__ int count_of[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  unsigned long long tokens = 0, nnz = 0, most = 0;  // thread 0's
  for (int64_t row = blockIdx.x; row < p.tokens; row += gridDim.x) {
    float largest = kLeastLargest;
    int count = 0;
    for (int i = static_cast<int>(threadIdx.x); i < p.pieces; i += kThreads) {
      const int64_t at = row * p.pieces + i;
      const uint4 g = reinterpret_cast<const uint4*>(p.g)[at];
      const uint4 u = p.u != nullptr ? reinterpret_cast<const uint4*>(p.u)[at] : uint4{};
      const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, us[4] = {u.x, u.y, u.z, u.w};
      uint32_t h[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = as_floats(gs[k]);
        float2 f = {activate<kActivation>(x.x, p.threshold),
                    activate<kActivation>(x.y, p.threshold)};
        if constexpr (kActivation == Activation::kRelu2) {  // the square may underflow
          count += !(x.x <= 0.0f) + !(x.y <= 0.0f);
        } else {
          count += (f.x != 0.0f) + (f.y != 0.0f);
        }
        if (p.u != nullptr) {
          float2 factor = as_floats(us[k]);
          if constexpr (kActivation == Activation::kDRelu) {
            factor = {activate<kActivation>(factor.x, 0.0f), activate<kActivation>(factor.y, 0.0f)};
          }
          f = {f.x * factor.x, f.y * factor.y};
        }
        const __nv_bfloat162 pair = __floats2bfloat162_rn(f.x, f.y);
        h[k] = *reinterpret_cast<const uint32_t*>(&pair);
        const float2 rounded = as_floats(h[k]);
        largest = fmaxf(largest, fmaxf(fabsf(rounded.x), fabsf(rounded.y)));
      }
      row_of_h[i] = {h[0], h[1], h[2], h[3]};
    }
    largest = warp_max(largest);
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) {
      largest_of[warp] = largest;
      count_of[warp] = count;
    }
    __syncthreads();
    largest = warp_max(largest_of[lane % kWarps]);
    constexpr float kMost = most_of(ByteType::kE4M3);
    const float inverse = kMost / largest;
    auto* values = reinterpret_cast<uint2*>(p.values) + row * 2 * p.pieces;
    for (int i = static_cast<int>(threadIdx.x); i < p.pieces; i += kThreads) {
      const uint4 h = row_of_h[i];
      const float2 a = as_floats(h.x), b = as_floats(h.y), c = as_floats(h.z), d = as_floats(h.w);
      values[i] = {byte_rows::quantise4<ByteType::kE4M3>(a.x, a.y, b.x, b.y, inverse),
                   byte_rows::quantise4<ByteType::kE4M3>(c.x, c.y, d.x, d.y, inverse)};
    }
    if (threadIdx.x == 0) {
      p.scales[row] = largest / kMost;
      int total = 0;
      for (int w = 0; w < kWarps; ++w) total += count_of[w];
      if (p.row_nnz != nullptr) p.row_nnz[row] = total;
      ++tokens;
      nnz += static_cast<unsigned long long>(total);
      most = max(most, static_cast<unsigned long long>(total));
    }
    __syncthreads();  // the next token overwrites the shared memory
  }
  if (p.activity == nullptr || threadIdx.x != 0) return;
  atomicAdd(&p.activity->tokens, tokens);
  atomicAdd(&p.activity->nnz, nnz);
  atomicMax(&p.activity->max_row_nnz, most);
}

template <Activation kActivation>
cudaError_t launch(const QuantiseHidden& p, cudaStream_t stream) {
  const auto kernel = quantise_hidden_kernel<kActivation>;
  const size_t bytes = static_cast<size_t>(p.pieces) * sizeof(uint4);
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) return status;
  const auto ctas = static_cast<unsigned>(std::min(p.tokens, kMostCtas));
  kernel<<<ctas, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_quantise_hidden(Activation activation, const QuantiseHidden& p,
                                   cudaStream_t stream) {
  switch (activation) {
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
    case Activation::kRelu2:
      return launch<Activation::kRelu2>(p, stream);
    case Activation::kFatRelu:
      return launch<Activation::kFatRelu>(p, stream);
    case Activation::kDRelu:
      return launch<Activation::kDRelu>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

void byte_dense_ffn_cuda(CudaContext& ctx, const ByteDenseFfnCuda& p) {
  TWELL_CHECK(p.width % 16 == 0 && p.ffn % 16 == 0 && p.ffn <= kMaxByteFfn,
              "a feed-forward layer in e4m3 of width {} and FFN size {}: both are multiples of 16, "
              "the latter at most {}",
              p.width, p.ffn, kMaxByteFfn);
  if (p.tokens == 0) return;
  const bool gated = !p.gate.empty();
  const ByteLinearCuda wide{.rows = p.rows, .cols = p.ffn, .inner = p.width, .x = p.x};
  ByteLinearCuda first = wide;
  first.w = gated ? p.gate : p.up;
  first.y = p.first;
  byte_linear_cuda(ctx, first);
  if (gated) {
    ByteLinearCuda second = wide;
    second.w = p.up;
    second.y = p.second;
    byte_linear_cuda(ctx, second);
  }
  auto* const hidden = reinterpret_cast<uint8_t*>(p.first);
  TWELL_CUDA_CHECK(launch_quantise_hidden(p.activation,
                                          {.g = p.first,
                                           .u = gated ? p.second : nullptr,
                                           .values = hidden,
                                           .scales = p.hidden_scales,
                                           .row_nnz = p.row_nnz,
                                           .activity = p.activity,
                                           .tokens = p.tokens,
                                           .pieces = static_cast<int>(p.ffn / 8),
                                           .threshold = p.threshold},
                                          ctx.stream()));
  byte_linear_cuda(ctx, {.rows = p.rows,
                         .cols = p.width,
                         .inner = p.ffn,
                         .x = {hidden, p.hidden_scales},
                         .x_stride = 2 * p.ffn,
                         .w = p.down,
                         .y = p.y,
                         .add = p.add});
}

}  // namespace twell
