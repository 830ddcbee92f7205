// SPDX-License-Identifier: Apache-2.0
// The sequences of a call, in shared memory, and which pieces of their attention a CTA has.
#pragma once

#include "twell/ops/decode/attend.cuh"

namespace twell::decode {

struct BatchShared {
  int32_t positions[kMaxDecodeTokens], kv_len[kMaxDecodeTokens];
  int64_t cache_rows[kMaxDecodeTokens], kv_begin[kMaxDecodeTokens];
  float cos[kMaxDecodeTokens][64], sin[kMaxDecodeTokens][64];  // of the tokens' positions

  // By all threads; ends without a barrier.
  __device__ __forceinline__ void load(const DecodeLayers& p) {
    const int thread = static_cast<int>(threadIdx.x), half = p.head_dim / 2;
    if (thread < p.tokens) {
      positions[thread] = p.positions[thread];
      kv_len[thread] = p.kv_len[thread];
      cache_rows[thread] = p.cache_rows[thread];
      kv_begin[thread] = p.kv_begin[thread];
    }
    for (int i = thread; i < p.tokens * half; i += static_cast<int>(blockDim.x)) {
      const int64_t at = int64_t{p.positions[i / half]} * half + i % half;
      cos[i / half][i % half] = p.cos[at];
      sin[i / half][i % half] = p.sin[at];
    }
  }

  // This CTA's share of the attention, kv_share heads for a key: what(item, keys, first row of the
  // sequence).
  template <typename What>
  __device__ __forceinline__ void each_item(const DecodeLayers& p, int kv_share,
                                            const What& what) const {
    int item = static_cast<int>(blockIdx.x);
    for (int token = 0; token < p.tokens; ++token) {
      const int keys = kv_len[token];
      const auto segments = static_cast<int>(decode_segments(keys));
      const int items = p.heads * segments;
      for (; item < items; item += static_cast<int>(gridDim.x)) {
        const int head = segments == 1 ? item : item / segments;
        what(
            AttendItem{token, head, kv_share == 1 ? head : head / kv_share, item - head * segments},
            keys, kv_begin[token]);
      }
      item -= items;
    }
  }
};

}  // namespace twell::decode
