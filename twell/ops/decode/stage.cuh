// SPDX-License-Identifier: Apache-2.0
// Inputs of products into shared memory: normed rows, attended rows, once all of them are there.
// Every thread that multiplies calls these.
#pragma once

#include "twell/ops/decode/product.cuh"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/tagged.cuh"

namespace twell::decode {

using sm90::bf16x2;
using sm90::scaled;
using sm90::to_floats;

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& bits) {
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = to_floats(pairs[i]);
    to[2 * i] = v.x;
    to[2 * i + 1] = v.y;
  }
}

inline constexpr int kMaxWidth = 16384;

// Zeros at first.
template <int kTokens>
struct NormShared {
  alignas(16) float squares[kTokens][kMaxWidth / 128];  // of 32 quads each
};

// The residual stream of all tokens, which may still be on its way.
struct Residual {
  sm90::Tagged* words;  // [M, D / 2]
  uint32_t tag;

  // Quads (four values) first, first + step, ..., `count` of them.
  template <int kMost>
  __device__ __forceinline__ void wait_quads(uint2 (&v)[kMost], int count, int first,
                                             int step) const {
    sm90::TaggedPair seen[kMost];
    sm90::wait_tagged(
        seen, count, [&](int i) { return words + (first + i * step) * 2; }, tag);
#pragma unroll
    for (int i = 0; i < kMost; ++i) v[i] = i < count ? sm90::values(seen[i]) : uint2{};
  }
  __device__ __forceinline__ sm90::Tagged load_pair(int at) const {
    return sm90::load_tagged(words + at);
  }
  __device__ __forceinline__ uint32_t wait_pair(sm90::Tagged seen, int at) const {
    return sm90::wait_tagged(seen, words + at, tag);
  }
};

__device__ __forceinline__ float sum_of_squares(const uint2& x) {
  const float2 a = to_floats(x.x), b = to_floats(x.y);
  return fmaf(a.x, a.x, a.y * a.y) + fmaf(b.x, b.x, b.y * b.y);
}

// rms_norm(x) rounded to bf16, zeros up to a whole block; for_screen: as `screen` has it, too. The
// sum of squares has the same order for any number of tokens: a warp's 32 quads, then these. In
// between x waits in shared memory.
template <int kTokens>
__device__ __forceinline__ void stage_normed(const DecodeLayers& p, const Residual& x,
                                             const __nv_bfloat16* weight,
                                             NormShared<kTokens>& shared, uint8_t* x_shared,
                                             int pitch, const ScreenX& screen, bool for_screen) {
  constexpr int kTeam = kThreads / kTokens;      // threads of a token
  constexpr int kAtOnce = kTokens == 1 ? 2 : 8;  // quads of a thread on their way
  const int thread = static_cast<int>(threadIdx.x), token = thread / kTeam;
  const int quads = p.width / 4, padded = (quads + 7) / 8 * 8;
  const auto* norm = reinterpret_cast<const uint2*>(weight);
  auto* row = reinterpret_cast<uint2*>(x_shared + token * pitch);
  const bool mine = token < p.tokens;
  uint2 scale[kAtOnce];  // of the first quads
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = thread % kTeam + i * kTeam;
    if (mine && at < quads) scale[i] = __ldg(norm + at);
  }
  if (mine) {
    for (int first = thread % kTeam; first - first % 32 < quads; first += kAtOnce * kTeam) {
      const int count = first < quads ? min((quads - first - 1) / kTeam + 1, kAtOnce) : 0;
      uint2 v[kAtOnce];
      x.wait_quads(v, count, token * quads + first, kTeam);
      float sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < count) row[first + i * kTeam] = v[i];
        sums[i] = sum_of_squares(v[i]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, step);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kTeam;
        if (at % 32 == 0 && at < quads) shared.squares[token][at / 32] = sums[i];
      }
    }
  }
  sync_threads();
  if (mine) {
    float total = 0.0f;
#pragma unroll 2
    for (int i = 0; i < (quads + 127) / 128; ++i) {
      const float4 four = reinterpret_cast<const float4*>(shared.squares[token])[i];
      total = (((total + four.x) + four.y) + four.z) + four.w;
    }
    const float inverse = rsqrtf(__fdividef(total, static_cast<float>(p.width)) + p.eps);
    for (int first = thread % kTeam; first < padded; first += kAtOnce * kTeam) {
      if (first >= kAtOnce * kTeam) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = first + i * kTeam;
          if (at < quads) scale[i] = __ldg(norm + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kTeam;
        if (at >= padded) break;
        uint2 v{};
        if (at < quads) {
          v = row[at];
          v = {scaled(v.x, scale[i].x, inverse), scaled(v.y, scale[i].y, inverse)};
        }
        row[at] = v;
        if constexpr (kTokens == 1) {
          if (for_screen) screen.store(at, v);
        }
      }
    }
  }
  sync_threads();
}

// Four values of a head, from `column` on, put together from the segments of a long sequence.
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

// The attended values, put together from the segments of long sequences.
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
