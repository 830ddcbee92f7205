// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/rms_norm_cuda.h"

#include "twell/sm90/dependent_launch.cuh"

namespace twell {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // values in one 16-byte access
// From so many tokens on a row of up to kWarpWidth values is a warp's: a lane has more of it on its
// way from memory at a time, and no warp waits for another.
constexpr int64_t kManyTokens = 1024;
constexpr int64_t kWarpWidth = 2048;

struct alignas(16) Piece {
  __nv_bfloat162 pair[kPiece / 2];
};

// Many rows pass the caches by: with plain accesses 131,072 rows of 2,048 take 0.32 ms in a model,
// with these 0.28.
template <bool kPassing>
__device__ __forceinline__ Piece load(const Piece* from) {
  if constexpr (kPassing) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return *reinterpret_cast<const Piece*>(&v);
  } else {
    return *from;
  }
}
template <bool kPassing>
__device__ __forceinline__ void store(Piece* to, const Piece& piece) {
  if constexpr (kPassing) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&piece));
  } else {
    *to = piece;
  }
}

// Of the kRowThreads threads that share a row: 32, or the whole block.
template <int kRowThreads>
__device__ float row_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if constexpr (kRowThreads == 32) return value;
  __shared__ float of_warp[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warp[warp];
  return sum;
}

// Each thread keeps its kPieces pieces of its row in registers.
template <int kRowThreads, int kPieces>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(RmsNormCuda p) {
  constexpr bool kPassing = kRowThreads == 32;
  sm90::allow_next_kernel();
  sm90::wait_for_previous_kernel();
  const int64_t token = int64_t{blockIdx.x} * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (token >= p.tokens) return;  // of whole warps alone: blocks that share a row have one
  const int64_t pieces = p.width / kPiece;
  const int64_t row = token * pieces;
  const int64_t first = threadIdx.x % kRowThreads;
  Piece s[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    s[i] = load<kPassing>(reinterpret_cast<const Piece*>(p.x) + row + at);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    if (p.residual != nullptr) {
      const Piece r = load<kPassing>(reinterpret_cast<const Piece*>(p.residual) + row + at);
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) s[i].pair[k] = __hadd2(s[i].pair[k], r.pair[k]);
      store<kPassing>(reinterpret_cast<Piece*>(p.sum) + row + at, s[i]);
    }
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(s[i].pair[k]);
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
    }
  }
  const float inv = rsqrtf(row_sum<kRowThreads>(squares) / static_cast<float>(p.width) + p.eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    const Piece w = reinterpret_cast<const Piece*>(p.weight)[at];
    Piece y;
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(s[i].pair[k]), scale = __bfloat1622float2(w.pair[k]);
      y.pair[k] = __floats2bfloat162_rn(v.x * inv * scale.x, v.y * inv * scale.y);
    }
    store<kPassing>(reinterpret_cast<Piece*>(p.y) + row + at, y);
  }
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormCuda& p, cudaStream_t stream) {
  if (p.width % kPiece != 0 || p.width > kMaxNormWidth || p.width <= 0) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) return cudaSuccess;
  const auto launch = [&](void (*kernel)(RmsNormCuda), int64_t rows_per_block = 1) {
    const int64_t blocks = (p.tokens + rows_per_block - 1) / rows_per_block;
    return sm90::launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream,
                                  p);
  };
  if (p.tokens >= kManyTokens && p.width <= kWarpWidth) {
    constexpr int kRows = kThreads / 32, kCovered = 32 * kPiece;
    if (p.width <= 2 * kCovered) return launch(rms_norm_kernel<32, 2>, kRows);
    if (p.width <= 4 * kCovered) return launch(rms_norm_kernel<32, 4>, kRows);
    return launch(rms_norm_kernel<32, kWarpWidth / kCovered>, kRows);
  }
  const int64_t covered = int64_t{kThreads} * kPiece;  // values of one piece per thread
  if (p.width <= covered) return launch(rms_norm_kernel<kThreads, 1>);
  if (p.width <= 2 * covered) return launch(rms_norm_kernel<kThreads, 2>);
  if (p.width <= 4 * covered) return launch(rms_norm_kernel<kThreads, 4>);
  return launch(rms_norm_kernel<kThreads, 8>);
}

}  // namespace twell
