// SPDX-License-Identifier: Apache-2.0
// Attention of a token's query over one segment of its sequence's keys, for one head, by a CTA:
// warps share the keys, kLanes lanes take a key's row together, 16 bytes each. A sequence of one
// segment gives the attended values, a longer one partial results.
#pragma once

#include "twell/ops/decode/stage.cuh"

namespace twell::decode {

inline constexpr float kLog2E = 1.4426950408889634f;

template <int kLanes>
struct AttendShared {
  alignas(16) __nv_bfloat16 token[3][kLanes * 8];  // the new token's query, key and value
  float top[kWarps], sum[kWarps];
  float value[kWarps][kLanes * 8];
};

struct AttendItem {
  int token, head, kv_head, segment;
};

// Asks for the item's keys and values to be brought into the L2 cache. By one warp.
__device__ __forceinline__ void prefetch(const DecodeLayers& p, const DecodeLayer& layer,
                                         const AttendItem& item, int kv_len, int64_t kv_begin) {
  const int begin = item.segment * static_cast<int>(kDecodeSegment);
  const int end = min(kv_len - 1, begin + static_cast<int>(kDecodeSegment));
  // Sector by sector: the copy engine would take as long for a row of 128 bytes as for a long one,
  // and weights would wait for it.
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

// The item's query, and the key and value of the new token, from the CTAs that make them.
template <int kLanes>
__device__ __forceinline__ void fetch_token(const DecodeLayers& p, uint32_t tag,
                                            const AttendItem& item, AttendShared<kLanes>& shared) {
  constexpr int kTeam = kLanes * 4;  // threads of a part
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
  constexpr int kInFlight = 6;  // keys a lane loads before it uses the first
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
  load(begin + lane_key);  // before the query is there
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
    const float top_or_0 = new_top == -INFINITY ? 0.0f : new_top;  // this lane has no key yet
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

  // Of a warp's lanes with the same columns, then of the warps, in their order.
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
  sync_threads();  // the next item writes `shared`
}

}  // namespace twell::decode
