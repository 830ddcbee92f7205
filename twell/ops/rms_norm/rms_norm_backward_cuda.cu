// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_backward_cuda.h"

#include "twell/base/column_sums.cuh"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPiece = 8;        // values in one 16-byte access
constexpr int64_t kMinRows = 8;  // of a block: fewer would write more partial sums than gradient
constexpr int64_t kMaxBlocks = 1024;

struct alignas(16) Piece {
  __nv_bfloat162 pair[kPiece / 2];
};

int64_t rows_of_block(int64_t tokens) {
  const int64_t rows = (tokens + kMaxBlocks - 1) / kMaxBlocks;
  return rows < kMinRows ? kMinRows : rows;
}

// Sums of a pair of values over the block. Calls take turns with two buffers, so that one barrier
// each is enough.
__device__ float2 block_sums(float2 value, int turn) {
  __shared__ float2 of_warp[2][kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  }
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

// A block takes a run of rows, one after the other; each thread keeps its pieces of a row, of the
// weight and of the block's part of the weight's gradient in registers.
//   d_s = d_y * weight * inv - s * inv^3 / D * sum(d_y * weight * s)
template <int kPieces>
__global__ void __launch_bounds__(kThreads)
    rms_norm_backward_kernel(RmsNormBackwardCuda p, int64_t rows) {
  const int64_t pieces = p.width / kPiece;
  const int64_t begin = blockIdx.x * rows;
  const int64_t end = begin + rows < p.tokens ? begin + rows : p.tokens;
  Piece weight[kPieces];
  float2 d_weight[kPieces][kPiece / 2] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = threadIdx.x + int64_t{i} * kThreads;
    if (at < pieces) weight[i] = reinterpret_cast<const Piece*>(p.weight)[at];
  }
  for (int64_t m = begin; m < end; ++m) {
    const int64_t row = m * pieces;
    Piece s[kPieces], d_y[kPieces], residual[kPieces];
    float2 sums{0.0f, 0.0f};  // of s^2 and of d_y * weight * s
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t at = threadIdx.x + int64_t{i} * kThreads;
      if (at >= pieces) break;
      s[i] = reinterpret_cast<const Piece*>(p.s)[row + at];
      d_y[i] = reinterpret_cast<const Piece*>(p.d_y)[row + at];
      if (p.d_residual != nullptr) {
        residual[i] = reinterpret_cast<const Piece*>(p.d_residual)[row + at];
      }
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) {
        const float2 v = __bfloat1622float2(s[i].pair[k]), d = __bfloat1622float2(d_y[i].pair[k]);
        const float2 w = __bfloat1622float2(weight[i].pair[k]);
        sums.x = fmaf(v.x, v.x, fmaf(v.y, v.y, sums.x));
        sums.y = fmaf(d.x * w.x, v.x, fmaf(d.y * w.y, v.y, sums.y));
      }
    }
    sums = block_sums(sums, static_cast<int>(m % 2));
    const auto width = static_cast<float>(p.width);
    const float inv = rsqrtf(sums.x / width + p.eps);
    const float shrink = sums.y * inv * inv * inv / width;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t at = threadIdx.x + int64_t{i} * kThreads;
      if (at >= pieces) break;
      Piece d_s;
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) {
        const float2 v = __bfloat1622float2(s[i].pair[k]), d = __bfloat1622float2(d_y[i].pair[k]);
        const float2 w = __bfloat1622float2(weight[i].pair[k]);
        d_weight[i][k].x = fmaf(d.x * v.x, inv, d_weight[i][k].x);
        d_weight[i][k].y = fmaf(d.y * v.y, inv, d_weight[i][k].y);
        float2 g{fmaf(d.x * w.x, inv, -shrink * v.x), fmaf(d.y * w.y, inv, -shrink * v.y)};
        if (p.d_residual != nullptr) {
          const float2 r = __bfloat1622float2(residual[i].pair[k]);
          g.x += r.x;
          g.y += r.y;
        }
        d_s.pair[k] = __floats2bfloat162_rn(g.x, g.y);
      }
      reinterpret_cast<Piece*>(p.d_s)[row + at] = d_s;
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = threadIdx.x + int64_t{i} * kThreads;
    if (at >= pieces) break;
    auto* to = reinterpret_cast<float4*>(p.partial + blockIdx.x * p.width + at * kPiece);
    to[0] = {d_weight[i][0].x, d_weight[i][0].y, d_weight[i][1].x, d_weight[i][1].y};
    to[1] = {d_weight[i][2].x, d_weight[i][2].y, d_weight[i][3].x, d_weight[i][3].y};
  }
}

}  // namespace

int64_t rms_norm_backward_partials(int64_t tokens) {
  const int64_t rows = rows_of_block(tokens);
  return (tokens + rows - 1) / rows;
}

cudaError_t launch_rms_norm_backward(const RmsNormBackwardCuda& p, cudaStream_t stream) {
  if (p.width % kPiece != 0 || p.width > kMaxNormWidth || p.width <= 0) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) return cudaSuccess;
  const int64_t rows = rows_of_block(p.tokens), count = rms_norm_backward_partials(p.tokens);
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

}  // namespace twell
