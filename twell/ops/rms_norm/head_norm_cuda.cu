// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rms_norm/head_norm_cuda.h"

namespace twell {
namespace {

constexpr int kWarps = 8;
constexpr int kPiece = 8;  // values in one 16-byte access; a warp's pieces hold a head

struct alignas(16) Piece {
  __nv_bfloat162 pair[kPiece / 2];
};

// A warp per head of a token.
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
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const float2 v = __bfloat1622float2(x.pair[k]);
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    const float inv = rsqrtf(squares / static_cast<float>(p.head_dim) + p.eps);
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

}  // namespace

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

}  // namespace twell
