// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_cuda.h"

#include <algorithm>

#include "twell/base/column_sums.cuh"
#include "twell/base/reduce.cuh"
#include "twell/base/rounding.h"
#include "twell/format/byte_rows.cuh"
#include "twell/gpu/gather.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/ops/rms_norm/norm_rows.cuh"

namespace twell {
namespace {

using namespace norm_rows;

template <int kRowThreads, int kPieces>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(RmsNormCuda p) {
  gpu::allow_next_kernel();
  gpu::wait_for_previous_kernel();
  const int64_t token = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (token >= p.tokens) return;  // whole warps only; never taken if a block shares a row
  Piece row[kPieces];
  norm_row<kRowThreads>(p, token, row);
}

template <int kRowThreads, int kPieces>
__global__ void __launch_bounds__(kThreads) rms_norm_bytes_kernel(RmsNormBytesCuda p) {
  gpu::allow_next_kernel();
  // The weight comes from device memory, for which few tokens would wait behind their row. So it is
  // on its way into the L2 while the previous kernel ends. A sector holds two pieces.
  if (blockIdx.x == 0 && threadIdx.x % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t at = threadIdx.x % kRowThreads + int64_t{i} * kRowThreads;
      if (at >= p.norm.width / kPiece) break;
      gpu::prefetch_around(reinterpret_cast<const Piece*>(p.norm.weight) + at);
    }
  }
  gpu::wait_for_previous_kernel();
  const int64_t token = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (token >= p.norm.tokens) return;  // whole warps only; never taken if a block shares a row
  Piece row[kPieces];
  norm_row<kRowThreads>(p.norm, token, row);
  const int64_t pieces = p.norm.width / kPiece;
  const int64_t first = threadIdx.x % kRowThreads;
  float largest = kLeastLargest;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (first + int64_t{i} * kRowThreads >= pieces) break;
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = as_floats(row[i].pair[k]);
      largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
    }
  }
  largest = warp_max(largest);
  if constexpr (kRowThreads != 32) {
    __shared__ float of_warp[kWarps];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = warp_max(of_warp[threadIdx.x % kWarps]);
  }
  constexpr float kMost = most_of(ByteType::kE4M3);
  const float inverse = kMost / largest;
  const int64_t y_row = p.norm.y_rows == nullptr ? token : p.norm.y_rows[token];
  auto* values = reinterpret_cast<uint2*>(p.values) + y_row * pieces;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    uint32_t bytes[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 a = as_floats(row[i].pair[2 * k]), b = as_floats(row[i].pair[2 * k + 1]);
      bytes[k] = byte_rows::quantise4<ByteType::kE4M3>(a.x, a.y, b.x, b.y, inverse);
    }
    values[at] = {bytes[0], bytes[1]};
  }
  if (first == 0) p.scales[y_row] = largest / kMost;
}

// Calls launch(kernel, rows per block) with the instance of `Kernels` for these sizes.
template <typename Kernels, typename Launch>
cudaError_t with_row_kernel(int64_t tokens, int64_t width, const Launch& launch) {
  if (warp_takes_row(tokens, width)) {
    constexpr int kRows = kThreads / 32, kCovered = 32 * kPiece;
    if (width <= 2 * kCovered) return launch(Kernels::template of<32, 2>(), kRows);
    if (width <= 4 * kCovered) return launch(Kernels::template of<32, 4>(), kRows);
    return launch(Kernels::template of<32, kWarpWidth / kCovered>(), kRows);
  }
  const int64_t covered = int64_t{kThreads} * kPiece;  // values of one piece per thread
  if (width <= covered) return launch(Kernels::template of<kThreads, 1>(), 1);
  if (width <= 2 * covered) return launch(Kernels::template of<kThreads, 2>(), 1);
  if (width <= 4 * covered) return launch(Kernels::template of<kThreads, 4>(), 1);
  return launch(Kernels::template of<kThreads, 8>(), 1);
}
struct NormKernels {
  template <int kRowThreads, int kPieces>
  static auto of() {
    return rms_norm_kernel<kRowThreads, kPieces>;
  }
};
struct NormBytesKernels {
  template <int kRowThreads, int kPieces>
  static auto of() {
    return rms_norm_bytes_kernel<kRowThreads, kPieces>;
  }
};

// Backward.

// Minimum rows per block: with fewer, the partial sums would have more bytes than the gradient.
constexpr int64_t kMinRows = 8;
constexpr int64_t kMaxBlocks = 1024;

int64_t rows_of_block(int64_t tokens) {
  const int64_t rows = (tokens + kMaxBlocks - 1) / kMaxBlocks;
  return rows < kMinRows ? kMinRows : rows;
}

// Blocks of a backward, each of which writes a row of partial sums. More tokens can have fewer.
int64_t blocks_of(int64_t tokens) {
  const int64_t rows = rows_of_block(tokens);
  return (tokens + rows - 1) / rows;
}

// Sums both values over the block. Calls alternate between two buffers (turn 0 and 1), so that one
// barrier per call is enough.
__device__ float2 block_sums(float2 value, int turn) {
  __shared__ float2 of_warp[2][kWarps];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warp[turn][threadIdx.x / 32] = value;
  __syncthreads();
  float2 sum{0.0f, 0.0f};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    sum.x += of_warp[turn][warp].x;
    sum.y += of_warp[turn][warp].y;
  }
  return sum;
}

// A block processes a run of rows in turn; each thread keeps its pieces of the row, of the weight
// and of the block's part of the weight's gradient in registers. With 8 pieces there are none left
// for the weight: it is read again, from the L1.
//   d_s = scale * (d_y * weight * inv - s * inv^3 / D * sum(d_y * weight * s))
template <int kPieces>
__global__ void __launch_bounds__(kThreads)
    rms_norm_backward_kernel(RmsNormBackwardCuda p, int64_t rows) {
  const int pieces = static_cast<int>(p.width / kPiece);
  const int64_t begin = blockIdx.x * rows;
  const int64_t end = begin + rows < p.tokens ? begin + rows : p.tokens;
  constexpr bool kKeepsWeight = kPieces < 8;
  Piece weights[kKeepsWeight ? kPieces : 1];
  const auto weight = [&](int i, int at) {
    return kKeepsWeight ? weights[i] : reinterpret_cast<const Piece*>(p.weight)[at];
  };
  float2 d_weight[kPieces][kPiece / 2] = {};
#pragma unroll
  for (int i = 0; kKeepsWeight && i < kPieces; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads;
    if (at < pieces) weights[i] = reinterpret_cast<const Piece*>(p.weight)[at];
  }
  for (int64_t m = begin; m < end; ++m) {
    const int64_t row = m * pieces;
    const int64_t d_y_row = p.d_y_rows == nullptr ? row : p.d_y_rows[m] * pieces;
    Piece s[kPieces], d_y[kPieces], residual[kPieces];
    float2 sums{0.0f, 0.0f};  // of s^2 and of d_y * weight * s
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at >= pieces) break;
      s[i] = reinterpret_cast<const Piece*>(p.s)[row + at];
      d_y[i] = reinterpret_cast<const Piece*>(p.d_y)[d_y_row + at];
      if (p.d_residual != nullptr) {
        residual[i] = reinterpret_cast<const Piece*>(p.d_residual)[row + at];
      }
      const Piece of_weight = weight(i, at);
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) {
        const float2 v = __bfloat1622float2(s[i].pair[k]), d = __bfloat1622float2(d_y[i].pair[k]);
        const float2 w = __bfloat1622float2(of_weight.pair[k]);
        sums.x = fmaf(v.x, v.x, fmaf(v.y, v.y, sums.x));
        sums.y = fmaf(d.x * w.x, v.x, fmaf(d.y * w.y, v.y, sums.y));
      }
    }
    sums = block_sums(sums, static_cast<int>(m % 2));
    const auto width = static_cast<float>(p.width);
    const float inv = rsqrtf(sums.x / width + p.eps);
    const float scaled = p.scale * inv, shrink = sums.y * scaled * inv * inv / width;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at >= pieces) break;
      Piece d_s;
      const Piece of_weight = weight(i, at);
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) {
        const float2 v = __bfloat1622float2(s[i].pair[k]), d = __bfloat1622float2(d_y[i].pair[k]);
        const float2 w = __bfloat1622float2(of_weight.pair[k]);
        d_weight[i][k].x = fmaf(d.x * v.x, scaled, d_weight[i][k].x);
        d_weight[i][k].y = fmaf(d.y * v.y, scaled, d_weight[i][k].y);
        float2 g{fmaf(d.x * w.x, scaled, -shrink * v.x), fmaf(d.y * w.y, scaled, -shrink * v.y)};
        if (p.d_residual != nullptr) {
          const float2 r = __bfloat1622float2(residual[i].pair[k]);
          g.x += r.x;
          g.y += r.y;
        }
        d_s.pair[k] = __floats2bfloat162_rn(g.x, g.y);
      }
      reinterpret_cast<Piece*>(p.d_s)[row + at] = d_s;
      if (p.d_s_copy != nullptr) {
        const int64_t copy_row = p.copy_rows == nullptr ? row : p.copy_rows[m] * pieces;
        reinterpret_cast<Piece*>(p.d_s_copy)[copy_row + at] = d_s;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads;
    if (at >= pieces) break;
    auto* to = reinterpret_cast<float4*>(p.partial + blockIdx.x * p.width + at * kPiece);
    to[0] = {d_weight[i][0].x, d_weight[i][0].y, d_weight[i][1].x, d_weight[i][1].y};
    to[1] = {d_weight[i][2].x, d_weight[i][2].y, d_weight[i][3].x, d_weight[i][3].y};
  }
}

// Heads of queries and keys.

// One warp per head of a token; each lane holds one piece of it.
__global__ void __launch_bounds__(kWarps * 32) head_norm_kernel(HeadNormCuda p, int heads) {
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= p.tokens * heads) return;
  const int head = static_cast<int>(item % heads);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool holds = lane * kPiece < p.head_dim;
  auto* at = reinterpret_cast<Piece*>(p.qkv + item * p.head_dim) + lane;
  Piece x = {};
  if (holds) x = *at;
  if (holds && p.bias != nullptr) {
    const Piece b = reinterpret_cast<const Piece*>(p.bias + head * p.head_dim)[lane];
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) x.pair[k] = __hadd2(x.pair[k], b.pair[k]);
  }
  if (head < p.heads + p.kv_heads) {
    if (holds && p.kept != nullptr) {
      const int64_t row = item / heads * (p.heads + p.kv_heads) + head;
      reinterpret_cast<Piece*>(p.kept + row * p.head_dim)[lane] = x;
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(x.pair[k]);
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
    }
    const float inv = rsqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.eps);
    const __nv_bfloat16* weight = head < p.heads ? p.q_norm : p.k_norm;
    if (holds) {
      const Piece w = reinterpret_cast<const Piece*>(weight)[lane];
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) {
        const float2 v = __bfloat1622float2(x.pair[k]), scale = __bfloat1622float2(w.pair[k]);
        x.pair[k] = __floats2bfloat162_rn(v.x * inv * scale.x, v.y * inv * scale.y);
      }
    }
  } else if (p.bias == nullptr) {
    return;
  }
  if (holds) *at = x;
}

// A block takes a run of tokens, its warps one head of a token at a time. Each lane holds one piece
// of a head and of the warp's parts of the two weights' gradients.
//   d_x = d_y * weight * inv - x * inv^3 / hd * sum(d_y * weight * x)
__global__ void __launch_bounds__(kWarps * 32)
    head_norm_backward_kernel(HeadNormBackwardCuda p, int64_t rows, int normed_heads) {
  __shared__ float2 of_warp[kWarps][32][kPiece / 2];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool holds = lane * kPiece < p.head_dim;
  const int heads = static_cast<int>(p.heads);
  const int64_t begin = blockIdx.x * rows;
  const int64_t end = begin + rows < p.tokens ? begin + rows : p.tokens;
  float2 d_weight[2][kPiece / 2] = {};
  const int64_t items = (end - begin) * normed_heads;
  for (int64_t i = warp; i < items; i += kWarps) {
    const int64_t m = begin + i / normed_heads;
    const int head = static_cast<int>(i % normed_heads);
    const bool key = head >= heads;
    Piece x = {}, d = {}, weight = {};
    auto* const at =
        reinterpret_cast<Piece*>(p.d_qkv + (m * (normed_heads + p.kv_heads) + head) * p.head_dim) +
        lane;
    if (holds) {
      x = reinterpret_cast<const Piece*>(p.kept + (m * normed_heads + head) * p.head_dim)[lane];
      d = *at;
      weight = reinterpret_cast<const Piece*>(key ? p.k_norm : p.q_norm)[lane];  // from the L1
    }
    float2 sums{0.0f, 0.0f};  // of x^2 and of d_y * weight * x
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(x.pair[k]), g = __bfloat1622float2(d.pair[k]);
      const float2 w = __bfloat1622float2(weight.pair[k]);
      sums.x = fmaf(v.x, v.x, fmaf(v.y, v.y, sums.x));
      sums.y = fmaf(g.x * w.x, v.x, fmaf(g.y * w.y, v.y, sums.y));
    }
    sums = warp_sum(sums);
    const auto width = static_cast<float>(p.head_dim);
    const float inv = rsqrtf(sums.x / width + p.eps);
    const float shrink = sums.y * inv * inv * inv / width;
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(x.pair[k]), g = __bfloat1622float2(d.pair[k]);
      const float2 w = __bfloat1622float2(weight.pair[k]);
      const float2 part{g.x * v.x * inv, g.y * v.y * inv};
      d_weight[0][k].x += key ? 0.0f : part.x;
      d_weight[0][k].y += key ? 0.0f : part.y;
      d_weight[1][k].x += key ? part.x : 0.0f;
      d_weight[1][k].y += key ? part.y : 0.0f;
      d.pair[k] = __floats2bfloat162_rn(fmaf(g.x * w.x, inv, -shrink * v.x),
                                        fmaf(g.y * w.y, inv, -shrink * v.y));
    }
    if (holds) *at = d;
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) of_warp[warp][lane][k] = d_weight[which][k];
    __syncthreads();
    if (warp == 0 && holds) {
      auto* const to = reinterpret_cast<float2*>(
          p.partial + (int64_t{which} * gridDim.x + blockIdx.x) * p.head_dim + lane * kPiece);
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) {
        float2 sum = of_warp[0][lane][k];
        for (int other = 1; other < kWarps; ++other) {
          sum.x += of_warp[other][lane][k].x;
          sum.y += of_warp[other][lane][k].y;
        }
        to[k] = sum;
      }
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormCuda& p, cudaStream_t stream) {
  if (p.width % kPiece != 0 || p.width > kMaxNormWidth || p.width <= 0) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) return cudaSuccess;
  return with_row_kernel<NormKernels>(p.tokens, p.width, [&](auto kernel, int64_t rows) {
    return gpu::launch_dependent(kernel, dim3(static_cast<unsigned>(ceil_div(p.tokens, rows))),
                                 kThreads, 0, stream, p);
  });
}

cudaError_t launch_rms_norm_bytes(const RmsNormBytesCuda& p, cudaStream_t stream) {
  const RmsNormCuda& norm = p.norm;
  if (norm.width % (2 * kPiece) != 0 || norm.width > kMaxNormWidth || norm.width <= 0 ||
      norm.y != nullptr) {
    return cudaErrorInvalidValue;
  }
  if (norm.tokens == 0) return cudaSuccess;
  return with_row_kernel<NormBytesKernels>(norm.tokens, norm.width, [&](auto kernel, int64_t rows) {
    return gpu::launch_dependent(kernel, dim3(static_cast<unsigned>(ceil_div(norm.tokens, rows))),
                                 kThreads, 0, stream, p);
  });
}

int64_t rms_norm_backward_partials(int64_t tokens) {
  return std::min((tokens + kMinRows - 1) / kMinRows, kMaxBlocks);
}

cudaError_t launch_rms_norm_backward(const RmsNormBackwardCuda& p, cudaStream_t stream) {
  if (p.width % kPiece != 0 || p.width > kMaxNormWidth || p.width <= 0) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) return cudaSuccess;
  const int64_t rows = rows_of_block(p.tokens), count = blocks_of(p.tokens);
  const auto blocks = static_cast<unsigned>(count);
  const int64_t covered = int64_t{kThreads} * kPiece;  // values of one piece per thread
  if (p.width <= covered) {
    rms_norm_backward_kernel<1><<<blocks, kThreads, 0, stream>>>(p, rows);
  } else if (p.width <= 2 * covered) {
    rms_norm_backward_kernel<2><<<blocks, kThreads, 0, stream>>>(p, rows);
  } else if (p.width <= 4 * covered) {
    rms_norm_backward_kernel<4><<<blocks, kThreads, 0, stream>>>(p, rows);
  } else {
    rms_norm_backward_kernel<8><<<blocks, kThreads, 0, stream>>>(p, rows);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_add_column_sums(p.partial, count, p.width, p.d_weight, stream);
}

cudaError_t launch_head_norm(const HeadNormCuda& p, cudaStream_t stream) {
  if (p.head_dim % kPiece != 0 || p.head_dim <= 0 || p.head_dim > 32 * kPiece) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) return cudaSuccess;
  const int64_t heads = p.heads + 2 * p.kv_heads;
  const int64_t blocks = (p.tokens * heads + kWarps - 1) / kWarps;
  head_norm_kernel<<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(
      p, static_cast<int>(heads));
  return cudaGetLastError();
}

int64_t head_norm_backward_partials(int64_t tokens) { return rms_norm_backward_partials(tokens); }

cudaError_t launch_head_norm_backward(const HeadNormBackwardCuda& p, cudaStream_t stream) {
  if (p.head_dim % kPiece != 0 || p.head_dim <= 0 || p.head_dim > 32 * kPiece) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) return cudaSuccess;
  const int64_t count = blocks_of(p.tokens);
  head_norm_backward_kernel<<<static_cast<unsigned>(count), kWarps * 32, 0, stream>>>(
      p, rows_of_block(p.tokens), static_cast<int>(p.heads + p.kv_heads));
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const cudaError_t error =
      launch_add_column_sums(p.partial, count, p.head_dim, p.d_q_norm, stream);
  if (error != cudaSuccess) return error;
  return launch_add_column_sums(p.partial + count * p.head_dim, count, p.head_dim, p.d_k_norm,
                                stream);
}

}  // namespace twell
