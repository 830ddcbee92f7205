// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/matmul/few_rows.h"

namespace twell {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kPiece = 8;  // values in one 16-byte load

struct alignas(16) Piece {
  __nv_bfloat162 pair[kPiece / 2];
};

__device__ Piece load_once(const __nv_bfloat16* p) {  // weights are not needed again
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(p));
  return *reinterpret_cast<const Piece*>(&bits);
}

__device__ float dot(const Piece& a, const Piece& b, float sum) {
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const float2 x = __bfloat1622float2(a.pair[i]), y = __bfloat1622float2(b.pair[i]);
    sum = fmaf(x.x, y.x, sum);
    sum = fmaf(x.y, y.y, sum);
  }
  return sum;
}

// One warp makes kCols columns of y for all rows of x. Loads of kDepth steps are in flight
// together.
template <int kRows, int kCols, int kDepth, typename Out>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(FewRows p) {
  const int lane = threadIdx.x % 32;
  const int64_t col = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kCols;
  if (col >= p.cols) return;
  float sum[kCols][kRows] = {};
  const int64_t step = int64_t{32} * kPiece;
  for (int64_t begin = lane * kPiece; begin < p.inner; begin += step * kDepth) {
    Piece w[kDepth][kCols];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        // Past the last column the last one is read again and its sum left unused.
        const int64_t row = col + c < p.cols ? col + c : p.cols - 1;
        const int64_t k = begin + d * step;
        if (k < p.inner) w[d][c] = load_once(p.w + row * p.inner + k);
      }
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int64_t k = begin + d * step;
      if (k >= p.inner) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = r < p.rows ? r : p.rows - 1;
        const Piece x = *reinterpret_cast<const Piece*>(p.x + row * p.inner + k);
#pragma unroll
        for (int c = 0; c < kCols; ++c) sum[c][r] = dot(x, w[d][c], sum[c][r]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        sum[c][r] += __shfl_xor_sync(0xffffffffu, sum[c][r], offset);
      }
      if (lane == (c * kRows + r) % 32 && r < p.rows && col + c < p.cols) {
        static_cast<Out*>(p.y)[r * p.cols + col + c] = static_cast<Out>(sum[c][r]);
      }
    }
  }
}

template <int kRows, int kCols, int kDepth>
void launch(const FewRows& p, cudaStream_t stream) {
  const int64_t per_block = int64_t{kWarps} * kCols;
  const auto blocks = static_cast<unsigned>((p.cols + per_block - 1) / per_block);
  if (p.f32_out) {
    few_rows_kernel<kRows, kCols, kDepth, float><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    few_rows_kernel<kRows, kCols, kDepth, __nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
  }
}

}  // namespace

cudaError_t launch_few_rows(const FewRows& p, cudaStream_t stream) {
  if (p.rows == 1) {
    launch<1, 1, 8>(p, stream);
  } else if (p.rows == 2) {
    launch<2, 1, 8>(p, stream);
  } else if (p.rows <= 4) {
    launch<4, 2, 4>(p, stream);
  } else {
    launch<8, 2, 4>(p, stream);
  }
  return cudaGetLastError();
}

}  // namespace twell
