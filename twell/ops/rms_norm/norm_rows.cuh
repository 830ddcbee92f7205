// SPDX-License-Identifier: Apache-2.0
// Device code of RMSNorm's rows, for every kernel that normalises: the threads that share a row,
// its pieces in their registers, 16-byte accesses, and the norm of one row. Kernels that call
// norm_row with the same threads and pieces per row give the same bits.
#pragma once

#include "twell/base/reduce.cuh"
#include "twell/ops/rms_norm/rms_norm_cuda.h"

namespace twell::norm_rows {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kPiece = 8;  // values in one 16-byte access
// From kManyTokens on, one warp handles a row of up to kWarpWidth values: each lane has more loads
// in flight, and no warp waits for another. Otherwise a block of kThreads shares a row.
inline constexpr int64_t kManyTokens = 1024;
inline constexpr int64_t kWarpWidth = 2048;
inline bool warp_takes_row(int64_t tokens, int64_t width) {
  return tokens >= kManyTokens && width <= kWarpWidth;
}

struct alignas(16) Piece {
  __nv_bfloat162 pair[kPiece / 2];
};

// One instruction per value, exact.
__device__ __forceinline__ float2 as_floats(const __nv_bfloat162& pair) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

// kPassing keeps many rows from filling the caches: 131,072 rows of 2,048 take 0.28 ms in a model,
// against 0.32 ms with plain accesses.
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

// Sum over the kRowThreads threads that share a row: a warp, or the whole block.
template <int kRowThreads>
__device__ float row_sum(float value) {
  value = warp_sum(value);
  if constexpr (kRowThreads == 32) return value;
  __shared__ float of_warp[kWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

// Writes y of one token, and sum if there is a residual. A thread has the pieces of the row whose
// index is its own plus a multiple of kRowThreads, in registers, and leaves those of y in `row`;
// without a y it only does that.
// kTogether loads all of the residual before the first sum is stored, which takes registers and
// hides latency where few warps fit on an SM.
template <int kRowThreads, bool kTogether = false, int kPieces>
__device__ __forceinline__ void norm_row(const RmsNormCuda& p, int64_t token,
                                         Piece (&row)[kPieces]) {
  constexpr bool kPassing = kRowThreads == 32;
  const int64_t pieces = p.width / kPiece;
  const int64_t begin = token * pieces;
  const int64_t first = threadIdx.x % kRowThreads;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    row[i] = load<kPassing>(reinterpret_cast<const Piece*>(p.x) + begin + at);
  }
  const int64_t residual_row = p.residual_rows == nullptr ? token : p.residual_rows[token];
  const auto* residual = reinterpret_cast<const Piece*>(p.residual) + residual_row * pieces;
  Piece loaded[kTogether ? kPieces : 1];
  if (kTogether && p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t at = first + int64_t{i} * kRowThreads;
      if (at >= pieces) break;
      loaded[kTogether ? i : 0] = load<kPassing>(residual + at);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    if (p.residual != nullptr) {
      const Piece r = kTogether ? loaded[kTogether ? i : 0] : load<kPassing>(residual + at);
#pragma unroll
      for (int k = 0; k < kPiece / 2; ++k) row[i].pair[k] = __hadd2(row[i].pair[k], r.pair[k]);
      store<kPassing>(reinterpret_cast<Piece*>(p.sum) + begin + at, row[i]);
    }
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = as_floats(row[i].pair[k]);
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
    }
  }
  const float inv =
      p.scale * rsqrtf(row_sum<kRowThreads>(squares) / static_cast<float>(p.width) + p.eps);
  const int64_t y_row = p.y_rows == nullptr ? token : p.y_rows[token];
  auto* y = reinterpret_cast<Piece*>(p.y) + y_row * pieces;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kRowThreads;
    if (at >= pieces) break;
    const Piece w = reinterpret_cast<const Piece*>(p.weight)[at];
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = as_floats(row[i].pair[k]), scale = as_floats(w.pair[k]);
      row[i].pair[k] = __floats2bfloat162_rn(v.x * inv * scale.x, v.y * inv * scale.y);
    }
    if (p.y != nullptr) store<kPassing>(y + at, row[i]);
  }
}

}  // namespace twell::norm_rows
