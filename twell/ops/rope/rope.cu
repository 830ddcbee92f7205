// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/rope/rope_cuda.h"

namespace twell {
namespace {

constexpr int kMaxThreads = 256;

template <int kPiece>
struct alignas(2 * kPiece) RopePiece {
  __nv_bfloat16 value[kPiece];
};

// One block per token. A thread rotates kPiece pairs of one head at a time: a piece of each half.
template <int kPiece>
__global__ void __launch_bounds__(kMaxThreads) rope_kernel(RopeCuda p) {
  using P = RopePiece<kPiece>;
  const int64_t token = blockIdx.x;
  const int half = static_cast<int>(p.head_dim) / 2;
  const int pieces = half / kPiece;  // per half of a head
  const int heads = static_cast<int>(p.heads), kv_heads = static_cast<int>(p.kv_heads);
  const bool cached = p.keys != nullptr;
  const int work = (heads + (cached || p.bias != nullptr ? 2 : 1) * kv_heads) * pieces;
  __nv_bfloat16* row = p.qkv + token * (heads + 2 * kv_heads) * p.head_dim;
  const int64_t cache_at = cached ? p.cache_rows[token] * kv_heads * p.head_dim : 0;
  const int64_t table_at = p.positions[token] * int64_t{half};
  for (int i = static_cast<int>(threadIdx.x); i < work; i += static_cast<int>(blockDim.x)) {
    const int head = i / pieces, at = i % pieces * kPiece;
    const __nv_bfloat16* from = row + head * p.head_dim + at;
    P first = *reinterpret_cast<const P*>(from);
    P second = *reinterpret_cast<const P*>(from + half);
    if (p.bias != nullptr) {
      const __nv_bfloat16* bias = p.bias + head * p.head_dim + at;
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        first.value[k] = __hadd(first.value[k], bias[k]);
        second.value[k] = __hadd(second.value[k], bias[half + k]);
      }
    }
    __nv_bfloat16* to = row + head * p.head_dim + at;
    if (cached && head >= heads) {
      const bool key = head < heads + kv_heads;
      to = (key ? p.keys : p.values) + cache_at +
           (head - heads - (key ? 0 : kv_heads)) * p.head_dim + at;
    }
    if (head < heads + kv_heads) {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        const float c = p.cos[table_at + at + k];
        const float s = p.inverse ? -p.sin[table_at + at + k] : p.sin[table_at + at + k];
        const float a = __bfloat162float(first.value[k]), b = __bfloat162float(second.value[k]);
        first.value[k] = __float2bfloat16(a * c - b * s);
        second.value[k] = __float2bfloat16(b * c + a * s);
      }
    }
    *reinterpret_cast<P*>(to) = first;
    *reinterpret_cast<P*>(to + half) = second;
  }
}

}  // namespace

cudaError_t launch_rope(const RopeCuda& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(p.tokens);
  if (p.head_dim % 16 == 0) {
    rope_kernel<8><<<blocks, kMaxThreads, 0, stream>>>(p);
  } else {
    rope_kernel<1><<<blocks, kMaxThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace twell
