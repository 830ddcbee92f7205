// SPDX-License-Identifier: Apache-2.0
// Attention of one query per sequence over its paged cache: bound by reading keys and values once.
// With a sliding window only the last keys are read.
// A block handles one split of the keys of one sequence and key/value head, for up to kGroup of the
// query heads that share it. A few lanes read a key's row together, 16 bytes each. The last block
// of a split sequence to finish adds up all blocks' results in a fixed order.
#include <cuda_bf16.h>

#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/attention/attention_cuda.h"
#include "twell/sm90/launch.cuh"

namespace twell {
namespace {

// The first of these rules that applies divides the keys. The fewer CTAs there are per SM, the more
// each has to have in flight; with many, one warp each is fastest, because none waits for another.
// Where a CTA has more warps its splits are longer, so that 64 keys of a long text are left to each
// warp: with fewer, merging the warps' results takes too large a part of its time.
struct DivisionRule {
  int warps;            // of a CTA
  int64_t keys;         // of a split, at least
  int64_t ctas_per_sm;  // at most
  bool all_splits;      // counts the CTAs of all splits of the longest texts, not of one split
  int queries;          // of a CTA, at most
};
constexpr int64_t kAnyNumber = int64_t{1} << 30;
constexpr DivisionRule kRules[] = {
    {.warps = 16, .keys = 1024, .ctas_per_sm = 2, .all_splits = true, .queries = 1},
    {.warps = 8, .keys = 512, .ctas_per_sm = 4, .all_splits = true, .queries = 1},
    {.warps = 4, .keys = 256, .ctas_per_sm = 8, .all_splits = false, .queries = 4},
    {.warps = 2, .keys = 256, .ctas_per_sm = 15, .all_splits = false, .queries = 4},
    {.warps = 1, .keys = 256, .ctas_per_sm = kAnyNumber, .all_splits = false, .queries = 2},
    {.warps = 2, .keys = 256, .ctas_per_sm = kAnyNumber, .all_splits = false, .queries = 4},
};
// A window bounds the keys of a CTA, and is rare: one division serves it.
constexpr AttentionDivision kSlidingDivision{.keys = 256, .warps = 4};

constexpr int kMostWarps = 16;
constexpr int64_t kLeastKeys = 256;  // of a split: with fewer, combining costs as much as a split
constexpr int64_t kMostKeys = 32 * kKvBlock;  // a warp holds the blocks of a split
constexpr int64_t kMostSplits = 64;           // bounds the workspace for long contexts
static_assert(std::ranges::all_of(kRules, [](const DivisionRule& rule) {
  return rule.warps <= kMostWarps && rule.keys >= kLeastKeys && rule.keys <= kMostKeys;
}));

// Query heads that a CTA takes of the `group` that share a key/value head.
int queries_per_cta(int64_t group) { return group > 2 ? 4 : static_cast<int>(group); }

// Whether a rule has so many warps for CTAs of so many queries.
constexpr bool has_rule(int warps, int queries) {
  return std::ranges::any_of(kRules, [=](const DivisionRule& rule) {
    return rule.warps == warps && queries <= rule.queries;
  });
}

// Keys of a split: `least`, or more where there would be too many splits.
int64_t split_keys(int64_t max_kv_len, int64_t least) {
  const int64_t share = round_up(ceil_div(max_kv_len, kMostSplits), kLeastKeys);
  return std::min(std::max(share, least), kMostKeys);
}

constexpr int kPiece = 8;     // values in one 16-byte load
constexpr int kInFlight = 4;  // keys a lane loads before it uses the first
constexpr float kLog2E = 1.4426950408889634f;

__device__ uint4 load_bits(const __nv_bfloat16* from) {
  return *reinterpret_cast<const uint4*>(from);
}

__device__ void unpack(float (&to)[kPiece], const uint4& bits) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

// A softmax-weighted sum of values over the keys seen so far.
struct Partial {
  float top;  // largest score, base 2
  float sum;
  float value[kPiece];

  __device__ void add(const Partial& other) {
    const float new_top = fmaxf(top, other.top);
    if (new_top == -INFINITY) return;
    const float mine = exp2f(top - new_top), others = exp2f(other.top - new_top);
    top = new_top;
    sum = sum * mine + other.sum * others;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) value[i] = value[i] * mine + other.value[i] * others;
  }
};

__device__ Partial shuffled(const Partial& from, int offset) {
  Partial to;
  to.top = __shfl_xor_sync(0xffffffffu, from.top, offset);
  to.sum = __shfl_xor_sync(0xffffffffu, from.sum, offset);
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    to.value[i] = __shfl_xor_sync(0xffffffffu, from.value[i], offset);
  return to;
}

// The oldest key that the sequence's query sees. kSliding: there is a window, which costs
// registers.
template <bool kSliding>
__device__ int oldest_key(const AttentionCuda& p, int kv_len) {
  return kSliding ? max(kv_len - static_cast<int>(p.window), 0) : 0;
}

// Writes out from the splits of one (sequence, head), in their order. Called by a whole block.
template <int kThreads, bool kSliding>
__device__ void combine(const AttentionCuda& p, const AttentionSplits& splits, int sequence,
                        int64_t head, int used) {
  const int oldest = kSliding ? oldest_key<kSliding>(p, p.sequences.kv_len[sequence]) : 0;
  const int first = oldest / static_cast<int>(splits.keys), end = first + used;
  const int64_t slot = (sequence * p.heads + head) * splits.count;
  float top = -INFINITY;
  for (int i = first; i < end; ++i) top = fmaxf(top, __ldcg(splits.max_sum + 2 * (slot + i)));
  for (int column = static_cast<int>(threadIdx.x); column < p.head_dim; column += kThreads) {
    float value = 0.0f, sum = 0.0f;
    for (int i = first; i < end; ++i) {
      const float weight = exp2f(__ldcg(splits.max_sum + 2 * (slot + i)) - top);
      sum += weight * __ldcg(splits.max_sum + 2 * (slot + i) + 1);
      value += weight * __ldcg(splits.values + (slot + i) * p.head_dim + column);
    }
    p.out[(p.sequences.q_begin[sequence] * p.heads + head) * p.head_dim + column] =
        __float2bfloat16(value / sum);
  }
}

// kLanes lanes per key, kLanes * 8 >= hd.
template <int kLanes, int kGroup, int kWarps, bool kSliding>
__global__ void __launch_bounds__(32 * kWarps)
    attention_decode_kernel(AttentionCuda p, AttentionSplits splits) {
  constexpr int kThreads = 32 * kWarps;
  const int group = static_cast<int>(p.heads / p.kv_heads);
  const int groups = (group + kGroup - 1) / kGroup;  // blocks that share a key/value head
  const int sequence = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y) / groups;
  const int head_in_group = static_cast<int>(blockIdx.y) % groups * kGroup;
  sm90::allow_next_kernel();
  const int kv_len = p.sequences.kv_len[sequence], q_len = p.sequences.q_len[sequence];
  const int64_t q_row = p.sequences.q_begin[sequence];
  const int keys = static_cast<int>(splits.keys), oldest = oldest_key<kSliding>(p, kv_len);
  const int begin = max(split * keys, oldest), end = min(kv_len, (split + 1) * keys);
  const bool works = begin < end && q_len > 0;
  const int first_block = works ? begin / kKvBlock : 0;
  const KvRows rows(p.sequences.tables + p.sequences.kv_begin[sequence] + first_block,
                    first_block * kKvBlock, works ? end : 1);
  sm90::wait_for_previous_kernel();
  if (!works) return;
  const int used = (kv_len + keys - 1) / keys - oldest / keys;  // splits with a visible key

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int at = lane % kLanes * kPiece;  // this lane's part of a head
  const bool inside = at < p.head_dim;
  const auto kv_stride = static_cast<int>(p.kv_stride);
  const int kv_at = kv_head * static_cast<int>(p.head_dim) + at;
  const float scale = kLog2E * rsqrtf(static_cast<float>(p.head_dim));
  float q[kGroup][kPiece] = {};
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    if (!inside || head_in_group + g >= group) continue;
    unpack(q[g], load_bits(p.q + q_row * p.q_stride +
                           (kv_head * group + head_in_group + g) * p.head_dim + at));
#pragma unroll
    for (int i = 0; i < kPiece; ++i) q[g][i] *= scale;
  }

  constexpr int kKeysPerWarp = 32 / kLanes;
  constexpr int kStep = kWarps * kKeysPerWarp;
  Partial partial[kGroup];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) partial[g] = {-INFINITY, 0.0f, {}};
  for (int base = begin; base < end; base += kStep * kInFlight) {
    uint4 k_bits[kInFlight] = {}, v_bits[kInFlight] = {};
    const int first = base + warp * kKeysPerWarp + lane / kLanes;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int key = first + u * kStep;
      const int64_t from = int64_t{rows.row(key)} * kv_stride + kv_at;
      if (!inside || key >= end) continue;
      k_bits[u] = load_bits(p.k + from);
      v_bits[u] = load_bits(p.v + from);
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      float score[kInFlight];
      float top = partial[g].top;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        score[u] = 0.0f;
        float k[kPiece];
        unpack(k, k_bits[u]);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) score[u] = fmaf(q[g][i], k[i], score[u]);
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) {
          score[u] += __shfl_xor_sync(0xffffffffu, score[u], offset);
        }
        const int key = first + u * kStep;
        if (key >= end) score[u] = -INFINITY;
        top = fmaxf(top, score[u]);
      }
      const float top_or_0 = top == -INFINITY ? 0.0f : top;  // -infinity: this lane has no key yet
      const float shrink = exp2f(partial[g].top - top_or_0);
      partial[g].top = top;
      partial[g].sum *= shrink;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) partial[g].value[i] *= shrink;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const float weight = exp2f(score[u] - top_or_0);
        partial[g].sum += weight;
        float v[kPiece];
        unpack(v, v_bits[u]);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          partial[g].value[i] = fmaf(weight, v[i], partial[g].value[i]);
        }
      }
    }
  }

  __shared__ Partial of_warp[kWarps][kGroup][kLanes];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      partial[g].add(shuffled(partial[g], offset));
    }
    if (lane < kLanes) of_warp[warp][g][lane] = partial[g];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kGroup * kLanes; i += kThreads) {
    const int g = i / kLanes, piece = i % kLanes;
    if (head_in_group + g >= group || piece * kPiece >= p.head_dim) continue;
    Partial total = of_warp[0][g][piece];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total.add(of_warp[w][g][piece]);
    const int64_t head = kv_head * group + head_in_group + g;
    if (used == 1) {
      __nv_bfloat16* to = p.out + (q_row * p.heads + head) * p.head_dim + piece * kPiece;
      for (int c = 0; c < kPiece; ++c) to[c] = __float2bfloat16(total.value[c] / total.sum);
      continue;
    }
    const int64_t slot = (sequence * p.heads + head) * splits.count + split;
    float* to = splits.values + slot * p.head_dim + piece * kPiece;
    for (int c = 0; c < kPiece; ++c) to[c] = total.value[c];
    if (piece == 0) {
      splits.max_sum[2 * slot] = total.top;
      splits.max_sum[2 * slot + 1] = total.sum;
    }
  }
  if (used == 1) return;

  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* arrived = splits.arrived + sequence * p.heads + kv_head * group + head_in_group;
    last = atomicAdd(arrived, 1) == used - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int g = 0; g < kGroup && head_in_group + g < group; ++g) {
    combine<kThreads, kSliding>(p, splits, sequence, kv_head * group + head_in_group + g, used);
  }
}

template <int kLanes, int kGroup, int kWarps, bool kSliding>
cudaError_t launch(const AttentionCuda& p, const AttentionSplits& splits, cudaStream_t stream) {
  const int64_t group = p.heads / p.kv_heads;
  const dim3 grid(static_cast<unsigned>(splits.count),
                  static_cast<unsigned>(p.kv_heads * ((group + kGroup - 1) / kGroup)),
                  static_cast<unsigned>(p.sequences.count));
  return sm90::launch_dependent(attention_decode_kernel<kLanes, kGroup, kWarps, kSliding>, grid,
                                32 * kWarps, 0, stream, p, splits);
}

// Launches CTAs of kWarps warps if the division has so many, or else of half as many.
template <int kLanes, int kGroup, int kWarps, bool kSliding>
cudaError_t launch_warps(const AttentionCuda& p, const AttentionSplits& splits,
                         cudaStream_t stream) {
  if constexpr (kSliding ? kWarps == kSlidingDivision.warps : has_rule(kWarps, kGroup)) {
    if (splits.warps == kWarps) return launch<kLanes, kGroup, kWarps, kSliding>(p, splits, stream);
  }
  if constexpr (kWarps > 1) {
    return launch_warps<kLanes, kGroup, kWarps / 2, kSliding>(p, splits, stream);
  } else {
    return cudaErrorInvalidValue;
  }
}

template <int kLanes, bool kSliding>
cudaError_t launch_lanes(const AttentionCuda& p, const AttentionSplits& splits,
                         cudaStream_t stream) {
  const int queries = queries_per_cta(p.heads / p.kv_heads);
  if (queries == 1) return launch_warps<kLanes, 1, kMostWarps, kSliding>(p, splits, stream);
  if (queries == 2) return launch_warps<kLanes, 2, kMostWarps, kSliding>(p, splits, stream);
  return launch_warps<kLanes, 4, kMostWarps, kSliding>(p, splits, stream);
}

template <bool kSliding>
cudaError_t launch_size(const AttentionCuda& p, const AttentionSplits& splits,
                        cudaStream_t stream) {
  if (p.head_dim <= 32) return launch_lanes<4, kSliding>(p, splits, stream);
  if (p.head_dim <= 64) return launch_lanes<8, kSliding>(p, splits, stream);
  if (p.head_dim <= 128) return launch_lanes<16, kSliding>(p, splits, stream);
  return launch_lanes<32, kSliding>(p, splits, stream);
}

}  // namespace

AttentionDivision attention_division(const AttentionCuda& p, int64_t max_kv_len,
                                     int multiprocessors) {
  AttentionDivision division = kSlidingDivision;
  const int64_t group = p.heads / p.kv_heads;
  const int queries = queries_per_cta(group);
  const int64_t ctas = p.sequences.count * p.kv_heads * ceil_div(group, int64_t{queries});
  const auto applies = [&](const DivisionRule& rule) {
    const int64_t keys = split_keys(max_kv_len, rule.keys);
    const int64_t splits = rule.all_splits ? ceil_div(max_kv_len, keys) : 1;
    return queries <= rule.queries && ctas * splits <= rule.ctas_per_sm * multiprocessors;
  };
  if (p.window == 0) {
    const DivisionRule& rule = *std::ranges::find_if(kRules, applies);
    division = {.keys = rule.keys, .warps = rule.warps};
  }
  division.keys = split_keys(max_kv_len, division.keys);
  return division;
}

int64_t attention_most_splits(int64_t max_kv_len) {
  return ceil_div(max_kv_len, split_keys(max_kv_len, kLeastKeys));
}

cudaError_t launch_attention_decode(const AttentionCuda& p, const AttentionSplits& splits,
                                    cudaStream_t stream) {
  if (p.sequences.tables == nullptr || splits.keys > kMostKeys || splits.keys % kKvBlock != 0) {
    return cudaErrorInvalidValue;
  }
  return p.window > 0 ? launch_size<true>(p, splits, stream)
                      : launch_size<false>(p, splits, stream);
}

}  // namespace twell
