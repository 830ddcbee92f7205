// SPDX-License-Identifier: Apache-2.0
// x += the CTAs' parts of y, in one order of additions for any number of tokens: teams take every
// n-th CTA's part; a warp's four teams are added up, then the warps.
#pragma once

#include "twell/ops/decode/own_neurons.cuh"

namespace twell::decode {

inline constexpr int kAddPairs = 8;  // neighbouring lanes, each with two columns of a token

template <int kTokens>
struct AddShared {
  static constexpr int kAtOnce = kTokens == 1 ? 1 : 4;  // tokens
  float2 sums[kWarps][kAtOnce * kAddPairs];
};

// This CTA's columns, in pairs.
struct AddShare {
  int begin, end;
  __device__ explicit AddShare(int width) {
    const auto first = [&](int64_t cta) { return static_cast<int>(cta * (width / 2) / gridDim.x); };
    begin = first(blockIdx.x);
    end = first(blockIdx.x + 1);
  }
};

// Of CTAs first, first + step, ..., `count` of them.
template <int kMost>
__device__ __forceinline__ void which_have_parts(bool (&has)[kMost], const DecodeLayers& p,
                                                 uint32_t tag, bool all, int first, int step,
                                                 int count) {
  if (all) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) has[i] = i < count;
    return;
  }
  sm90::Tagged seen[kMost];
  sm90::wait_all_tagged(
      seen, [&](int i) { return i < count; },
      [&](int i) { return sm90::load_tagged(p.workspace.fired + first + i * step); }, tag);
#pragma unroll
  for (int i = 0; i < kMost; ++i) has[i] = i < count && static_cast<uint32_t>(seen[i]) != 0;
}

// all: every CTA has a part, rather than those that say so in workspace.fired; of one token.
// before: x in front of the FFN. done(place of the pair in x, its two values).
template <int kTokens, typename Done>
__device__ __forceinline__ void add_parts(const DecodeLayers& p, uint32_t tag, bool all,
                                          const AddShare& share, const Residual& before,
                                          AddShared<kTokens>& shared, const Done& done) {
  constexpr int kAtOnce = AddShared<kTokens>::kAtOnce, kTeams = kThreads / kAddPairs;
  constexpr int kParts = 5;  // on their way
  const int thread = static_cast<int>(threadIdx.x), ctas = static_cast<int>(gridDim.x);
  const int team = thread / kAddPairs, lane = thread % kAddPairs, pairs = p.width / 2;
  for (int base = share.begin; base < share.end; base += kAddPairs) {
    const int pair = base + lane;
    const bool inside = pair < share.end;
    for (int token = 0; token < p.tokens; token += kAtOnce) {
      const int finished = token + team;  // by the first threads
      const bool finishes = inside && team < kAtOnce && finished < p.tokens;
      const int at = finished * pairs + pair;
      sm90::Tagged x{};
      if (finishes) x = before.load_pair(at);
      float2 sums[kAtOnce] = {};
      for (int first = team; first < ctas; first += kTeams * kParts) {
        if constexpr (kTokens == 1) {
          const sm90::Tagged* words = p.workspace.tagged_parts + pair * 2;
          sm90::TaggedPair seen[kParts];
          const int count = inside ? min((ctas - first - 1) / kTeams + 1, kParts) : 0;
          bool has[kParts];
          which_have_parts(has, p, tag, all, first, kTeams, count);
          sm90::wait_all_tagged(
              seen, [&](int i) { return has[i]; },
              [&](int i) { return sm90::load_tagged_pair(words + (first + i * kTeams) * p.width); },
              tag);
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            if (!has[i]) continue;
            const uint2 v = sm90::values(seen[i]);
            sums[0].x += __uint_as_float(v.x);
            sums[0].y += __uint_as_float(v.y);
          }
        } else {
          const auto* parts = reinterpret_cast<const float2*>(p.workspace.parts) + pair;
          float2 part[kParts][kAtOnce] = {};
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const int cta = first + i * kTeams;
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) {
              if (cta >= ctas || !inside || token + t >= p.tokens) break;
              part[i][t] = __ldcg(parts + int64_t{cta * p.tokens + token + t} * pairs);
            }
          }
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            if (first + i * kTeams >= ctas) break;
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) {
              sums[t].x += part[i][t].x;
              sums[t].y += part[i][t].y;
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
#pragma unroll
        for (int offset = kAddPairs; offset < 32; offset *= 2) {
          sums[t].x += __shfl_xor_sync(~0u, sums[t].x, offset);
          sums[t].y += __shfl_xor_sync(~0u, sums[t].y, offset);
        }
        if (thread % 32 < kAddPairs) shared.sums[thread / 32][t * kAddPairs + lane] = sums[t];
      }
      sync_threads();
      if (finishes) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum.x += shared.sums[w][thread].x;
          sum.y += shared.sums[w][thread].y;
        }
        const float2 was = to_floats(before.wait_pair(x, at));
        done(at, bf16x2(was.x + sum.x, was.y + sum.y));
      }
      sync_threads();
    }
  }
}

}  // namespace twell::decode
