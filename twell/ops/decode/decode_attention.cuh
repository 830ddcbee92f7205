// SPDX-License-Identifier: Apache-2.0
// Attention inside the kernel of all layers (decode_layers_sm90.cu). The work is cut into items:
// one head's query over one segment of its sequence's keys. CTAs take items round-robin; within
// one, warps share the keys, and kLanes lanes read a key's row together, 16 bytes each. A sequence
// of one segment gives the attended values at once; the partial results of a longer one are merged
// by the CTAs that read them for the output projection.
#pragma once

#include "twell/ops/decode/decode_layers.h"
#include "twell/ops/decode/skinny_gemm.cuh"
#include "twell/sm90/tagged.cuh"

namespace twell::decode {

using namespace skinny_gemm;
using sm90::bf16x2;
using sm90::to_floats;

inline constexpr float kLog2E = 1.4426950408889634f;

template <int kLanes>
struct AttendShared {
  alignas(16) __nv_bfloat16 token[3][kLanes * 8];  // the new token's query, key and value
  float top[kWarps], sum[kWarps];
  float value[kWarps][kLanes * 8];
};

// One head of one token, over one segment of keys.
struct AttendItem {
  int token, head, kv_head, segment;
};

// The sequences of a call, in shared memory.
struct BatchShared {
  int32_t positions[kMaxDecodeTokens], kv_len[kMaxDecodeTokens];
  int64_t cache_rows[kMaxDecodeTokens], kv_begin[kMaxDecodeTokens];
  float cos[kMaxDecodeTokens][64], sin[kMaxDecodeTokens][64];  // of the tokens' positions

  // All threads call this; the caller synchronises.
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

  // Calls what(item, kv_len, kv_begin) for the items of this CTA, assigned round-robin over all
  // sequences. kv_share: query heads per key head.
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

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& bits) {
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = to_floats(pairs[i]);
    to[2 * i] = v.x;
    to[2 * i + 1] = v.y;
  }
}

// Prefetches the item's keys and values into the L2 cache; by one warp.
__device__ __forceinline__ void prefetch(const DecodeLayers& p, const DecodeLayer& layer,
                                         const AttendItem& item, int kv_len, int64_t kv_begin) {
  const int begin = item.segment * static_cast<int>(kDecodeSegment);
  const int end = min(kv_len - 1, begin + static_cast<int>(kDecodeSegment));
  // By sectors, not by TMA, which would take as long for a row of 128 bytes as for a long one,
  // while the weights wait.
  constexpr int kSector = 16;  // values
  const int sectors = p.head_dim / kSector, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int i = lane; i < (end - begin) * sectors; i += 32) {
    const int key = begin + i / sectors;
    const int64_t from =
        ((kv_begin + key) * p.kv_heads + item.kv_head) * p.head_dim + i % sectors * kSector;
    sm90::prefetch_around(layer.keys + from);
    sm90::prefetch_around(layer.values + from);
  }
}

// Waits for the item's query and the new token's key and value, and copies them to shared memory.
template <int kLanes>
__device__ __forceinline__ void fetch_token(const DecodeLayers& p, uint32_t tag,
                                            const AttendItem& item, AttendShared<kLanes>& shared) {
  constexpr int kTeam = kLanes * 4;  // threads that copy one of the three
  const int half = p.head_dim / 2, part = static_cast<int>(threadIdx.x) / kTeam;
  const int i = static_cast<int>(threadIdx.x) % kTeam;
  if (part < 3 && i < half) {
    const int head = part == 0 ? item.head : p.heads + (part - 1) * p.kv_heads + item.kv_head;
    const sm90::Tagged* word =
        p.workspace.qkv + (item.token * (p.heads + 2 * p.kv_heads) + head) * half + i;
    const uint32_t v = sm90::wait_tagged(sm90::load_tagged(word), word, tag);
    shared.token[part][i] = __ushort_as_bfloat16(static_cast<unsigned short>(v & 0xffff));
    shared.token[part][i + half] = __ushort_as_bfloat16(static_cast<unsigned short>(v >> 16));
  }
  sync_threads();
}

template <int kLanes>
__device__ __forceinline__ void attend(const DecodeLayers& p, const DecodeLayer& layer,
                                       uint32_t tag, const AttendItem& item, int kv_len,
                                       int64_t kv_begin, AttendShared<kLanes>& shared) {
  constexpr int kInFlight = 6;  // keys that a lane loads ahead
  constexpr int kKeysPerWarp = 32 / kLanes, kStep = kWarps * kKeysPerWarp;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int at = lane % kLanes * 8;
  const bool inside = at < p.head_dim;
  const int begin = item.segment * static_cast<int>(kDecodeSegment);
  const int end = min(kv_len, begin + static_cast<int>(kDecodeSegment));
  const int64_t stride = int64_t{p.kv_heads} * p.head_dim;
  const int64_t first_value = kv_begin * stride + int64_t{item.kv_head} * p.head_dim + at;
  const int newest = kv_len - 1;
  uint4 k_bits[kInFlight] = {}, v_bits[kInFlight] = {};
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int key = first + u * kStep;
      if (!inside || key >= end || key == newest) continue;
      k_bits[u] = __ldcg(reinterpret_cast<const uint4*>(layer.keys + first_value + key * stride));
      v_bits[u] = __ldcg(reinterpret_cast<const uint4*>(layer.values + first_value + key * stride));
    }
  };
  const int lane_key = warp * kKeysPerWarp + lane / kLanes;
  load(begin + lane_key);  // issued before the wait for the query, to hide its latency
  fetch_token<kLanes>(p, tag, item, shared);
  float q[8] = {};
  if (inside) unpack(q, *reinterpret_cast<const uint4*>(&shared.token[0][at]));
  const float scale = kLog2E * rsqrtf(static_cast<float>(p.head_dim));
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] *= scale;

  float top = -INFINITY, sum = 0.0f, value[8] = {};
#pragma unroll 1
  for (int base = begin; base < end; base += kStep * kInFlight) {
    const int first = base + lane_key;
    if (base > begin) load(first);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + u * kStep != newest || !inside) continue;
      k_bits[u] = *reinterpret_cast<const uint4*>(&shared.token[1][at]);
      v_bits[u] = *reinterpret_cast<const uint4*>(&shared.token[2][at]);
    }
    float score[kInFlight], new_top = top;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      float k[8];
      unpack(k, k_bits[u]);
      score[u] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) score[u] = fmaf(q[i], k[i], score[u]);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (float& of_key : score) {
        of_key += __shfl_xor_sync(~0u, of_key, offset);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + u * kStep >= end) score[u] = -INFINITY;
      new_top = fmaxf(new_top, score[u]);
    }
    const float top_or_0 = new_top == -INFINITY ? 0.0f : new_top;  // no key so far
    const float shrink = exp2f(top - top_or_0);
    top = new_top;
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] *= shrink;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const float weight = exp2f(score[u] - top_or_0);
      float v[8];
      unpack(v, v_bits[u]);
      sum += weight;
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = fmaf(weight, v[i], value[i]);
    }
  }

  // Merges the lanes of a warp that hold the same columns, then the warps, in a fixed order.
  float warp_top = top;
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
    warp_top = fmaxf(warp_top, __shfl_xor_sync(~0u, warp_top, offset));
  }
  const float shrink = warp_top == -INFINITY ? 0.0f : exp2f(top - warp_top);
  sum *= shrink;
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] *= shrink;
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
    sum += __shfl_xor_sync(~0u, sum, offset);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] += __shfl_xor_sync(~0u, value[i], offset);
  }
  if (lane < kLanes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) shared.value[warp][lane * 8 + i] = value[i];
  }
  if (lane == 0) {
    shared.top[warp] = warp_top;
    shared.sum[warp] = sum;
  }
  sync_threads();
  if (const int i = static_cast<int>(threadIdx.x); i < p.head_dim / 2) {
    float all_top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all_top = fmaxf(all_top, shared.top[w]);
    float all_sum = 0.0f, low = 0.0f, high = 0.0f;  // of two columns
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2f(shared.top[w] - all_top);
      all_sum = fmaf(weight, shared.sum[w], all_sum);
      low = fmaf(weight, shared.value[w][i * 2], low);
      high = fmaf(weight, shared.value[w][i * 2 + 1], high);
    }
    const int64_t head = int64_t{item.token} * p.heads + item.head;
    const DecodeWorkspace& w = p.workspace;
    if (kv_len <= kDecodeSegment) {
      sm90::store_tagged(w.attended + head * (p.head_dim / 2) + i,
                         bf16x2(low / all_sum, high / all_sum), tag);
    } else {
      const int64_t slot = head * w.segments + item.segment;
      sm90::store_tagged(w.segment_values + slot * p.head_dim + i * 2, __float_as_uint(low),
                         __float_as_uint(high), tag);
      if (i == 0) {
        sm90::store_tagged(w.segment_sums + slot * 2, __float_as_uint(all_top),
                           __float_as_uint(all_sum), tag);
      }
    }
  }
  sync_threads();  // the next item overwrites `shared`
}

// Merges the segments of a long sequence: four values of a head, from `column` on.
__device__ __forceinline__ uint2 merge_segments(const DecodeWorkspace& w, uint32_t tag,
                                                int segments, int64_t head, int head_dim,
                                                int column) {
  constexpr int kAtOnce = 2, kPairsEach = 3;
  const sm90::Tagged* sums = w.segment_sums + head * w.segments * 2;
  const sm90::Tagged* values = w.segment_values + head * w.segments * head_dim + column;
  const auto floats = [](const sm90::TaggedPair& pair) {
    const uint2 v = sm90::values(pair);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
  };
  float top = -INFINITY, sum = 0.0f, value[4] = {};
#pragma unroll 1
  for (int base = 0; base < segments; base += kAtOnce) {
    sm90::TaggedPair seen[kAtOnce * kPairsEach];
    const auto from = [&](int i) {
      const int s = base + i / kPairsEach, piece = i % kPairsEach;
      return piece == 0 ? sums + s * 2 : values + s * head_dim + (piece - 1) * 2;
    };
    const int count = min(segments - base, kAtOnce) * kPairsEach;
    sm90::wait_tagged(seen, count, from, tag);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * kPairsEach >= count) break;
      const float2 top_sum = floats(seen[i * kPairsEach]);
      const float2 a = floats(seen[i * kPairsEach + 1]), b = floats(seen[i * kPairsEach + 2]);
      const float new_top = fmaxf(top, top_sum.x);
      const float shrink = exp2f(top - new_top), weight = exp2f(top_sum.x - new_top);
      top = new_top;
      sum = sum * shrink + weight * top_sum.y;
      const float part[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = value[k] * shrink + weight * part[k];
    }
  }
  return {bf16x2(value[0] / sum, value[1] / sum), bf16x2(value[2] / sum, value[3] / sum)};
}

// Waits for the attended values of all heads and stores them in x_shared, padded with zeros to a
// whole block. All threads that multiply call it.
template <int kTokens>
__device__ __forceinline__ void stage_attended(const DecodeLayers& p, uint32_t tag,
                                               const int32_t* kv_len, uint8_t* x_shared,
                                               int pitch) {
  constexpr int kTeam = kThreads / kTokens, kAtOnce = kTokens == 1 ? 2 : 8;
  const int token = static_cast<int>(threadIdx.x) / kTeam;
  const int quads = p.heads * p.head_dim / 4, padded = (quads + 7) / 8 * 8;
  if (token < p.tokens) {
    const auto segments = static_cast<int>(decode_segments(kv_len[token]));
    const sm90::Tagged* words = p.workspace.attended + int64_t{token} * quads * 2;
    const auto store = [&](int at, const uint2& v) {
      *reinterpret_cast<uint2*>(x_shared + token * pitch + at * 8) = v;
    };
    const int first = static_cast<int>(threadIdx.x) % kTeam;
    for (int base = first; base < padded; base += kTeam * kAtOnce) {
      sm90::TaggedPair seen[kAtOnce];
      const auto from = [&](int i) { return words + (base + i * kTeam) * 2; };
      if (segments == 1 && base < quads) {
        sm90::wait_tagged(seen, min((quads - base - 1) / kTeam + 1, kAtOnce), from, tag);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * kTeam;
        if (at >= padded) break;
        if (at >= quads) {
          store(at, uint2{});
        } else if (segments == 1) {
          store(at, sm90::values(seen[i]));
        } else {
          store(at, merge_segments(p.workspace, tag, segments,
                                   int64_t{token} * p.heads + at * 4 / p.head_dim, p.head_dim,
                                   at * 4 % p.head_dim));
        }
      }
    }
  }
  sync_threads();
}

}  // namespace twell::decode
