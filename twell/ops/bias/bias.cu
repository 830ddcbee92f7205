// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/bias/bias_cuda.h"

#include "twell/base/column_sums.cuh"
#include "twell/base/for_each.cuh"
#include "twell/base/rounding.h"

namespace twell {
namespace {

constexpr int kBiasThreads = 128;
constexpr int kBiasPiece = 8;      // values in one 16-byte access
constexpr int64_t kBiasRows = 64;  // rows per block

struct alignas(16) BiasPiece {
  __nv_bfloat162 pair[kBiasPiece / 2];
};

// Adds the bias to piece i of x.
struct AddBias {
  BiasForwardCuda p;
  int64_t pieces;  // per row

  __device__ void operator()(int64_t i) const {
    const BiasPiece bias = reinterpret_cast<const BiasPiece*>(p.bias)[i % pieces];
    BiasPiece x = reinterpret_cast<const BiasPiece*>(p.x)[i];
#pragma unroll
    for (int k = 0; k < kBiasPiece / 2; ++k) {
      const float2 a = __bfloat1622float2(x.pair[k]), b = __bfloat1622float2(bias.pair[k]);
      x.pair[k] = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
    }
    reinterpret_cast<BiasPiece*>(p.x)[i] = x;
  }
};

// Block (rows, columns): the sums of a run of rows, each of `places` values; 0 behind the width.
__global__ void __launch_bounds__(kBiasThreads)
    row_sums_kernel(BiasBackwardCuda p, int64_t places) {
  const int64_t column = (int64_t{blockIdx.y} * kBiasThreads + threadIdx.x) * kBiasPiece;
  if (column >= p.width) return;
  const int64_t begin = int64_t{blockIdx.x} * kBiasRows;
  const int64_t end = begin + kBiasRows < p.tokens ? begin + kBiasRows : p.tokens;
  float2 sum[kBiasPiece / 2] = {};
#pragma unroll 8
  for (int64_t m = begin; m < end; ++m) {
    const BiasPiece row = *reinterpret_cast<const BiasPiece*>(p.d_y + m * places + column);
#pragma unroll
    for (int k = 0; k < kBiasPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(row.pair[k]);
      sum[k].x += v.x;
      sum[k].y += v.y;
    }
  }
#pragma unroll
  for (int k = 0; k < kBiasPiece / 2; ++k) {
    if (column + 2 * k >= p.width) sum[k].x = 0.0f;
    if (column + 2 * k + 1 >= p.width) sum[k].y = 0.0f;
  }
  auto* to = reinterpret_cast<float4*>(p.partial + blockIdx.x * places + column);
  to[0] = {sum[0].x, sum[0].y, sum[1].x, sum[1].y};
  to[1] = {sum[2].x, sum[2].y, sum[3].x, sum[3].y};
}

}  // namespace

cudaError_t launch_bias_forward(const BiasForwardCuda& p, cudaStream_t stream) {
  const int64_t pieces = ceil_div(p.width, int64_t{kBiasPiece});
  return launch_for_each(p.tokens * pieces, AddBias{p, pieces}, stream);
}

int64_t bias_backward_partials(int64_t tokens) { return (tokens + kBiasRows - 1) / kBiasRows; }

cudaError_t launch_bias_backward(const BiasBackwardCuda& p, cudaStream_t stream) {
  const int64_t places = round_up(p.width, int64_t{kBiasPiece});
  const int64_t count = bias_backward_partials(p.tokens), columns = kBiasThreads * kBiasPiece;
  if (count == 0 || p.width == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(count),
                  static_cast<unsigned>((p.width + columns - 1) / columns));
  row_sums_kernel<<<grid, kBiasThreads, 0, stream>>>(p, places);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_add_column_sums(p.partial, count, places, p.d_bias, stream);
}

}  // namespace twell
