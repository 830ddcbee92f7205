// SPDX-License-Identifier: Apache-2.0
// What becomes of sums: queries, keys and values with their rotation, counts of what fired.
#pragma once

#include "twell/ops/decode/batch.cuh"

namespace twell::decode {

// A group of q/k/v rows.
struct QkvGroup {
  int head;   // among those of q, k and v
  int first;  // low row of its first pair, in the head
};

// A pair of values of a token: into the words of all heads, and the cache.
__device__ __forceinline__ void finish_qkv(const DecodeLayers& p, const DecodeLayer& l,
                                           uint32_t tag, const BatchShared& batch,
                                           const QkvGroup& group, int token, int pair, float low,
                                           float high) {
  const int half = p.head_dim / 2, heads = p.heads + 2 * p.kv_heads;
  const int head = group.head, i = group.first + pair;
  if (l.b_qkv != nullptr) {
    low += __bfloat162float(l.b_qkv[head * p.head_dim + i]);
    high += __bfloat162float(l.b_qkv[head * p.head_dim + i + half]);
  }
  if (head < p.heads + p.kv_heads) {
    const float c = batch.cos[token][i], s = batch.sin[token][i];
    const float turned = low * c - high * s;
    high = high * c + low * s;
    low = turned;
  }
  const uint32_t bits = bf16x2(low, high);
  sm90::store_tagged(p.workspace.qkv + (token * heads + head) * half + i, bits, tag);
  if (head < p.heads) return;
  const bool key = head < p.heads + p.kv_heads;
  const int kv_head = head - p.heads - (key ? 0 : p.kv_heads);
  auto* row = reinterpret_cast<unsigned short*>(
      (key ? l.keys : l.values) + (batch.cache_rows[token] * p.kv_heads + kv_head) * p.head_dim);
  row[i] = static_cast<unsigned short>(bits & 0xffff);
  row[i + half] = static_cast<unsigned short>(bits >> 16);
}

// nnz: of this thread.
__device__ __forceinline__ void count_fired(const DecodeLayers& p, const DecodeLayer& l, int nnz) {
  if (l.activity == nullptr) return;
  const int total = __reduce_add_sync(~0u, nnz);
  if (threadIdx.x % 32 != 0) return;
  if (total > 0) atomicAdd(&l.activity->nnz, static_cast<unsigned long long>(total));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&l.activity->tokens, static_cast<unsigned long long>(p.tokens));
  }
}

}  // namespace twell::decode
