// SPDX-License-Identifier: Apache-2.0
// Attention of one query per sequence over its paged cache: bound by reading keys and values once.
// With a sliding window only the last keys are read.
//
// A CTA handles one split of the keys of a sequence and key/value head, for up to 8 of the query
// heads that share it. There are two kernels:
// - With several query heads the products run on the tensor cores (mma.sync), so that arithmetic
//   for all these heads costs less time than reading their keys and values. A warp takes 16 keys at
//   a time: scores [16 keys, 8 queries] = K Q^T, then out [hd, 8 queries] += V^T weights. Keys and
//   values go from memory into the registers in which mma.sync takes them: a lane loads 16 bytes of
//   a row, and the columns of a head are assigned to the instruction's indices to suit. The next
//   keys are loaded behind the scores and the next values behind their product, so that a warp
//   always has a tile of each on the way.
// - With one query head seven of eight columns of such a product would be empty. There a lane
//   multiplies 8 columns of a key's row, and a warp has several rows of keys and of values on the
//   way.
// Keys and values in 8 bits take the first kernel whatever the heads: they become bf16, exactly, in
// 2 instructions each, and the tensor cores do the rest. A key's scale multiplies its score and a
// value's its weight.
// The last CTA of a sequence to finish adds up all splits' results in a fixed order.
#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/byte_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/attention/attention_cuda.h"

namespace twell {
namespace {

constexpr int kTile = 16;  // keys of one tensor-core product
using route::kLeastKeys;
using route::kMostQueries;
using route::kWarpsPerSm;
constexpr int kPiece = 8;  // values in one 16-byte load
static_assert(kKvBlock % kTile == 0 && kLeastKeys % kKvBlock == 0);

// What a CTA computes. Only lengths and tables are read to find it, so that it may be found before
// the previous kernel ends.
struct Work {
  __device__ Work(const AttentionCuda& p, const AttentionSplits& splits)
      : group(static_cast<int>(p.heads / p.kv_heads)),
        sequence(static_cast<int>(blockIdx.z)),
        split(static_cast<int>(blockIdx.x)),
        q_row(p.sequences.q_begin[sequence]) {
    const int ctas = (group + kMostQueries - 1) / kMostQueries;  // that share a key/value head
    kv_head = static_cast<int>(blockIdx.y) / ctas;
    head_in_group = static_cast<int>(blockIdx.y) % ctas * kMostQueries;
    const int kv_len = p.sequences.kv_len[sequence];
    const int oldest = p.window > 0 ? max(kv_len - static_cast<int>(p.window), 0) : 0;
    const int first = oldest / kKvBlock * kKvBlock;
    const int visible = p.sequences.q_len[sequence] > 0 ? kv_len - first : 0;
    const int most = static_cast<int>(splits.count);
    const int share = (visible + most - 1) / most;
    const int keys = max((share + kKvBlock - 1) / kKvBlock * kKvBlock, kLeastKeys);
    used = (visible + keys - 1) / keys;
    first_block = (first + split * keys) / kKvBlock;
    begin = max(first + split * keys, oldest);
    end = min(first + (split + 1) * keys, kv_len);
  }
  __device__ bool exists() const { return split < used; }
  // Query head of one of the CTA's queries, and whether there are so many.
  __device__ int head(int query) const { return kv_head * group + head_in_group + query; }
  __device__ bool has_head(int query) const { return head_in_group + query < group; }

  int group;  // query heads of a key/value head
  int sequence;
  int split;
  int64_t q_row;
  int kv_head;
  int head_in_group;  // the CTA's first
  int used;           // splits of the sequence
  int first_block;
  int begin, end;  // keys
};

// Lets the next kernel start, reads where the keys lie, and waits for the previous kernel, which
// may write the last of them. The rows are of no use where there is no work.
__device__ __forceinline__ KvRows begin_work(const AttentionCuda& p, const Work& work) {
  gpu::allow_next_kernel();
  const bool works = work.exists();
  const int first_block = works ? work.first_block : 0;
  const KvRows rows(p.sequences.tables + p.sequences.kv_begin[work.sequence] + first_block,
                    first_block * kKvBlock, works ? work.end : 1);
  gpu::wait_for_previous_kernel();
  return rows;
}

// The thread's warp. That it is a constant in CTAs of one warp lets the compiler see that all lanes
// take the same keys: their numbers are in uniform registers, and shuffles need no second path.
template <int kWarps>
__device__ __forceinline__ int warp_of() {
  return kWarps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32;
}

// kPiece values of a row, as a lane loads them.
template <typename T>
using PieceOf = std::conditional_t<sizeof(T) == 1, uint2, uint4>;

template <typename T>
__device__ __forceinline__ PieceOf<T> load_if(bool valid, const T* from) {
  return valid ? *reinterpret_cast<const PieceOf<T>*>(from) : PieceOf<T>{};
}

// Values 2 i and 2 i + 1 of a piece in bf16.
using gpu::word;
__device__ __forceinline__ uint32_t word(const uint2& bytes, int i) {
  return gpu::bytes_to_bf16x2(i < 2 ? bytes.x : bytes.y, i % 2);
}

// How many c there are with columns kEvery * c + kPiece * piece inside the head. A comparison of c
// with it takes one register for all c.
template <int kEvery>
__device__ __forceinline__ int parts_inside(const AttentionCuda& p, int piece) {
  return (static_cast<int>(p.head_dim) - piece * kPiece + kEvery - 1) / kEvery;
}

// The part of 16 keys that lane 4 g + t holds: columns 32 c + 8 t .. + 7 of the head.
template <int kHeadDim, typename T>
struct KeyTile {
  static constexpr int kParts = kHeadDim / 32;
  PieceOf<T> low[kParts], high[kParts];  // of keys g and g + 8

  // The first key lies at `row` and is number `key`. Those outside begin .. end are zeros.
  __device__ __forceinline__ void load(const AttentionCuda& p, const T* row, int key, int begin,
                                       int end) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    const int parts = parts_inside<32>(p, t);
    const int low_parts = key + g >= begin && key + g < end ? parts : 0;
    const int high_parts = key + g + 8 >= begin && key + g + 8 < end ? parts : 0;
    const int stride = static_cast<int>(p.kv_stride);
    const T* from = row + g * stride + t * kPiece;
    const T* from_high = from + 8 * stride;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      low[c] = load_if(c < low_parts, from + 32 * c);
      high[c] = load_if(c < high_parts, from_high + 32 * c);
    }
  }
};

// The part of 16 values that it holds: columns 64 c + 8 g .. + 7.
template <int kHeadDim, typename T>
struct ValueTile {
  static constexpr int kParts = kHeadDim / 64;
  PieceOf<T> of_key[kParts][4];  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9

  __device__ __forceinline__ void load(const AttentionCuda& p, const T* row, int key, int begin,
                                       int end) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 2 * t + i % 2 + i / 2 * 8;
      const int parts = key + at >= begin && key + at < end ? parts_inside<64>(p, g) : 0;
      const T* from = row + at * static_cast<int>(p.kv_stride) + g * kPiece;
#pragma unroll
      for (int c = 0; c < kParts; ++c) of_key[c][i] = load_if(c < parts, from + 64 * c);
    }
  }
};

// The scales of rows g and g + 8 of a tile; bf16 has none.
template <typename T>
struct TileScales {
  __device__ __forceinline__ void load(const float*, int, int, int) {}
  __device__ __forceinline__ float scaled(float value, int) const { return value; }
};
template <>
struct TileScales<int8_t> {
  float of[2];

  // The tile's first key has the scale *first and is number `key`. Keys outside begin .. end have
  // none, because what lies there may be NaN.
  __device__ __forceinline__ void load(const float* first, int key, int begin, int end) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = g + 8 * i;
      of[i] = key + at >= begin && key + at < end ? first[at] : 0.0f;
    }
  }
  __device__ __forceinline__ float scaled(float value, int half) const { return value * of[half]; }
};

// A head's keys or values in the cache, and its scales.
template <typename T>
__device__ __forceinline__ const T* head_rows(const AttentionCuda& p, const __nv_bfloat16* wide,
                                              const KvBytes& bytes, int head) {
  if constexpr (sizeof(T) == 1) {
    return bytes.data + head * p.head_dim;
  } else {
    return wide + head * p.head_dim;
  }
}
// Where the scales of a tile begin.
template <typename T>
__device__ __forceinline__ const float* tile_scales(const AttentionCuda& p, const KvBytes& bytes,
                                                    int row, int head) {
  return sizeof(T) == 1 ? bytes.scales + kv_scale(row, head, p.kv_heads) : nullptr;
}

__device__ void add(float4& to, const float4& from, float weight) {
  to.x = fmaf(weight, from.x, to.x);
  to.y = fmaf(weight, from.y, to.y);
  to.z = fmaf(weight, from.z, to.z);
  to.w = fmaf(weight, from.w, to.w);
}

// Writes four columns of a head of out.
__device__ void write_out(const AttentionCuda& p, const Work& work, int head, int column,
                          const float4& value, float sum) {
  const float weight = 1.0f / sum;
  *reinterpret_cast<uint2*>(p.out + (work.q_row * p.heads + head) * p.head_dim + column) = {
      gpu::bf16x2(value.x * weight, value.y * weight),
      gpu::bf16x2(value.z * weight, value.w * weight)};
}

// A query's maximum (base 2) and sum, and four columns of its values, over the keys of a CTA.
__device__ void write_partial(const AttentionCuda& p, const AttentionSplits& splits,
                              const Work& work, int head, int column, const float4& value,
                              float top, float sum) {
  const int64_t slot = (work.sequence * p.heads + head) * splits.count + work.split;
  *reinterpret_cast<float4*>(splits.values + slot * p.head_dim + column) = value;
  if (column == 0) *reinterpret_cast<float2*>(splits.max_sum + 2 * slot) = {top, sum};
}

// Adds up what the CTAs of all splits wrote, and writes out.
__device__ void combine(const AttentionCuda& p, const AttentionSplits& splits, const Work& work,
                        int head, int column) {
  constexpr int kAtOnce = 8;  // loads on the way
  const int64_t slot = (work.sequence * p.heads + head) * splits.count;
  const auto* max_sum = reinterpret_cast<const float2*>(splits.max_sum) + slot;
  const float* values = splits.values + slot * p.head_dim + column;
  float top = -INFINITY, sum = 0.0f;
  float4 total{};
  for (int first = 0; first < work.used; first += kAtOnce) {
    float2 of[kAtOnce];
    float4 value[kAtOnce];
    float new_top = top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = min(first + i, work.used - 1);
      of[i] = __ldcg(max_sum + split);
      value[i] = __ldcg(reinterpret_cast<const float4*>(values + split * p.head_dim));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) new_top = fmaxf(new_top, of[i].x);
    const float shrink = exp2f(top - new_top);
    top = new_top;
    sum *= shrink;
    total = {total.x * shrink, total.y * shrink, total.z * shrink, total.w * shrink};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = first + i < work.used ? exp2f(of[i].x - top) : 0.0f;
      sum = fmaf(weight, of[i].y, sum);
      add(total, value[i], weight);
    }
  }
  write_out(p, work, head, column, total, sum);
}

// What the warps of a CTA found, in terms of the CTA's largest score.
template <int kHeadDim, int kWarps, int kQueries>
struct WarpResults {
  static constexpr int kQuads = kHeadDim / 4;
  float top[kWarps][kQueries];  // a warp's largest score, base 2
  float sum[kWarps][kQueries];
  float4 values[kWarps][kQueries][kQuads + 1];  // fewer bank conflicts for the 1

  // The factor that brings what this warp summed up to the CTA's largest score. All of top is
  // written.
  __device__ float shrink(int query, float top_of_warp) const {
    float of_all = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_all = fmaxf(of_all, top[w][query]);
    return exp2f(top_of_warp - of_all);
  }

  // Adds up the warps' results, and all splits' where this CTA is the last of the sequence's, and
  // writes out. Called by all threads, when all has been written.
  __device__ void finish(const AttentionCuda& p, const AttentionSplits& splits,
                         const Work& work) const {
    const auto for_each_quad = [&](const auto& function) {
      for (int i = static_cast<int>(threadIdx.x); i < kQueries * kQuads; i += 32 * kWarps) {
        const int query = i / kQuads, column = i % kQuads * 4;
        if (work.has_head(query) && column < p.head_dim) function(query, column);
      }
    };
    for_each_quad([&](int query, int column) {
      float4 total{};
      float largest = -INFINITY, total_sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        largest = fmaxf(largest, top[w][query]);
        total_sum += sum[w][query];
        add(total, values[w][query][column / 4], 1.0f);
      }
      if (work.used == 1) {
        write_out(p, work, work.head(query), column, total, total_sum);
      } else {
        write_partial(p, splits, work, work.head(query), column, total, largest, total_sum);
      }
    });
    if (work.used == 1) return;

    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int32_t* arrived = splits.arrived + work.sequence * p.heads + work.head(0);
      last = atomicAdd(arrived, 1) == work.used - 1;
      if (last) *arrived = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for_each_quad(
        [&](int query, int column) { combine(p, splits, work, work.head(query), column); });
  }
};

// What follows from a tile's scores of two queries, of keys g and g + 8: they become weights, and
// shrink what the lane's sums are multiplied with for the new largest scores.
__device__ __forceinline__ void to_weights(float (&score)[4], float (&top)[2], float (&sum)[2],
                                           float (&shrink)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float new_top = fmaxf(score[i], score[i + 2]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      new_top = fmaxf(new_top, __shfl_xor_sync(0xffffffffu, new_top, offset));
    }
    new_top = fmaxf(new_top, top[i]);  // finite: every tile has a visible key
    shrink[i] = exp2f(top[i] - new_top);
    top[i] = new_top;
    score[i] = exp2f(score[i] - new_top);
    score[i + 2] = exp2f(score[i + 2] - new_top);
    sum[i] = sum[i] * shrink[i] + score[i] + score[i + 2];
  }
}

// Adds a tile's values times their weights to `out`.
template <int kHeadDim, typename T>
__device__ __forceinline__ void add_values(float (&out)[kHeadDim / 16][4], const float (&shrink)[2],
                                           const ValueTile<kHeadDim, T>& v,
                                           const float (&score)[4]) {
  const uint32_t weights_low = gpu::transposed(gpu::bf16x2(score[0], score[1]));
  const uint32_t weights_high = gpu::transposed(gpu::bf16x2(score[2], score[3]));
#pragma unroll
  for (int c = 0; c < kHeadDim / 64; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&o)[4] = out[4 * c + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) o[j] *= shrink[j % 2];
      const auto& of_key = v.of_key[c];
      const uint32_t v0 = word(of_key[0], i), v1 = word(of_key[1], i);
      const uint32_t v2 = word(of_key[2], i), v3 = word(of_key[3], i);
      constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
      gpu::mma_16x8x16(o, __byte_perm(v0, v1, kLowHalves), __byte_perm(v0, v1, kHighHalves),
                       __byte_perm(v2, v3, kLowHalves), __byte_perm(v2, v3, kHighHalves),
                       weights_low, weights_high);
    }
  }
}

// Writes what a warp found in the group kernel's order, in terms of the CTA's largest scores.
// Called by all threads.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void gather(WarpResults<kHeadDim, kWarps, kMostQueries>& results,
                                       const Work& work, const float (&top)[2], float (&sum)[2],
                                       const float (&out)[kHeadDim / 16][4]) {
  const int warp = warp_of<kWarps>(), lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (g == 0) results.top[warp][2 * t + i] = top[i];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = 2 * t + i;
    if (!work.has_head(query)) continue;
    const float shrink = results.shrink(query, top[i]);
    if (g == 0) results.sum[warp][query] = sum[i] * shrink;
#pragma unroll
    for (int c = 0; c < kHeadDim / 64; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&even)[4] = out[4 * c + 2 * half];
        const float(&odd)[4] = out[4 * c + 2 * half + 1];
        results.values[warp][query][16 * c + 2 * g + half] = {
            even[i] * shrink, even[i + 2] * shrink, odd[i] * shrink, odd[i + 2] * shrink};
      }
    }
  }
}

// Columns 32 c + 8 t .. + 7 of query g, which lane 4 g + t multiplies. Those of the widest heads
// lie in shared memory, once for all warps: with them, a tile of keys, one of values and the sums a
// lane would have more values than registers. Made by all threads of the CTA.
template <int kHeadDim, int kWarps>
struct QueryColumns {
  static constexpr int kParts = kHeadDim / 32;
  static constexpr bool kShared = kHeadDim > 128;

  __device__ __forceinline__ QueryColumns(const AttentionCuda& p, const Work& work) {
    const int warp = warp_of<kWarps>(), lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const auto load = [&](int c) {
      const int at = 32 * c + t * kPiece;
      return load_if(work.has_head(g) && at < p.head_dim,
                     p.q + work.q_row * p.q_stride + work.head(g) * p.head_dim + at);
    };
    if constexpr (kShared) {
      __shared__ uint4 parts[kParts][32];
      for (int c = warp; c < kParts; c += kWarps) parts[c][lane] = load(c);
      __syncthreads();
      address = static_cast<uint32_t>(__cvta_generic_to_shared(&parts[0][lane]));
    } else {
#pragma unroll
      for (int c = 0; c < kParts; ++c) own[c] = load(c);
    }
  }
  // Assembly reads shared memory here, because the compiler would load all parts in front of the
  // loop over keys and keep them in registers.
  __device__ __forceinline__ uint4 part(int c) const {
    if constexpr (kShared) {
      return gpu::load_shared16(address + c * 32 * static_cast<uint32_t>(sizeof(uint4)));
    } else {
      return own[c];
    }
  }

  uint4 own[kShared ? 1 : kParts];
  uint32_t address;
};

// For several query heads of each key/value head, and for rows in 8 bits (T is int8_t). With wide
// heads this is fastest when the compiler may take all registers (1 CTA per SM), with others when
// it chooses how many (0).
template <int kHeadDim, int kWarps, typename T>
__global__ void __launch_bounds__(32 * kWarps, kHeadDim > 64 ? 1 : 0)
    attention_decode_group_kernel(AttentionCuda p, AttentionSplits splits) {
  const Work work(p, splits);
  const KvRows rows = begin_work(p, work);
  if (!work.exists()) return;
  const int begin = work.begin, end = work.end;

  const int warp = warp_of<kWarps>(), lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const T* k_head = head_rows<T>(p, p.k, p.k8, work.kv_head);
  const T* v_head = head_rows<T>(p, p.v, p.v8, work.kv_head);
  // Tiles on the way, of keys and of values: two in 8 bits have the bytes of one in bf16. With the
  // widest heads registers hold one.
  constexpr int kAhead = kHeadDim <= 128 ? 2 / sizeof(T) : 1;
  constexpr int kStep = kWarps * kTile;  // from a warp's tile to its next
  KeyTile<kHeadDim, T> k[kAhead];
  ValueTile<kHeadDim, T> v[kAhead];
  TileScales<T> k_scale[kAhead], v_scale[kAhead];
  const auto load_keys = [&](int u, int row, int64_t at, int key) {
    k[u].load(p, k_head + at, key, begin, end);
    k_scale[u].load(tile_scales<T>(p, p.k8, row, work.kv_head), key, begin, end);
  };
  const auto load_values = [&](int u, int row, int64_t at, int key) {
    v[u].load(p, v_head + at, key, begin, end);
    v_scale[u].load(tile_scales<T>(p, p.v8, row, work.kv_head), key, begin, end);
  };
  int key = begin / kTile * kTile + warp * kTile;
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int row = rows.row(key + u * kStep);
    const int64_t at = row * p.kv_stride;
    load_keys(u, row, at, key + u * kStep);
    load_values(u, row, at, key + u * kStep);
  }

  const QueryColumns<kHeadDim, kWarps> q(p, work);
  const float scale = kLog2E * rsqrtf(static_cast<float>(p.head_dim));

  // A lane has queries 2 t and 2 t + 1: their largest scores (base 2) over the keys of all lanes,
  // and sums over its own keys.
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  // out[4 c + i] holds column 64 c + 8 g + 2 i of queries 2 t and 2 t + 1, then the next column of
  // both.
  float out[kHeadDim / 16][4] = {};
  // One tile, of which slot u holds keys and values; loads the one that takes their place.
  const auto attend = [&](int u, int key) {
    const int next = key + kAhead * kStep, row = rows.row(next);
    const int64_t row_at = row * p.kv_stride;
    float score[4] = {};  // key g with queries 2 t and 2 t + 1, then key g + 8 with both
#pragma unroll
    for (int c = 0; c < kHeadDim / 32; ++c) {
      const auto &low = k[u].low[c], &high = k[u].high[c];
      const uint4 query = q.part(c);
      gpu::mma_16x8x16(score, word(low, 0), word(high, 0), word(low, 1), word(high, 1), query.x,
                       query.y);
      gpu::mma_16x8x16(score, word(low, 2), word(high, 2), word(low, 3), word(high, 3), query.z,
                       query.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = k_scale[u].scaled(score[i], i / 2);
    load_keys(u, row, row_at, next);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = key + g + i / 2 * 8;
      score[i] = at >= begin && at < end ? score[i] * scale : -INFINITY;
    }
    float shrink[2];
    to_weights(score, top, sum, shrink);
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = v_scale[u].scaled(score[i], i / 2);
    add_values(out, shrink, v[u], score);
    load_values(u, row, row_at, next);
  };
  for (; key < end; key += kAhead * kStep) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u == 0 || key + u * kStep < end) attend(u, key + u * kStep);
    }
  }

  __shared__ WarpResults<kHeadDim, kWarps, kMostQueries> results;
  gather(results, work, top, sum, out);
  __syncthreads();
  results.finish(p, splits, work);
}

// Eight values of a row.
__device__ __forceinline__ void unpack(float (&to)[kPiece], const uint4& bits) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(word(bits, i) << 16);
    to[2 * i + 1] = __uint_as_float(word(bits, i) & 0xffff0000u);
  }
}

// The same of the single kernel, whose lanes have a largest score, a sum and values each.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void gather(WarpResults<kHeadDim, kWarps, 1>& results, float top,
                                       float sum, float (&value)[kPiece]) {
  constexpr int kLanes = kHeadDim / kPiece;  // of a row
  const int warp = warp_of<kWarps>(), lane = static_cast<int>(threadIdx.x) % 32;
  float top_of_warp = top;
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
    top_of_warp = fmaxf(top_of_warp, __shfl_xor_sync(0xffffffffu, top_of_warp, offset));
  }
  if (lane == 0) results.top[warp][0] = top_of_warp;
  __syncthreads();
  const float shrink = results.shrink(0, top);
  sum *= shrink;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) value[i] *= shrink;
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
  }
  if (lane == 0) results.sum[warp][0] = sum;
  if (lane < kLanes) {
    results.values[warp][0][2 * lane] = {value[0], value[1], value[2], value[3]};
    results.values[warp][0][2 * lane + 1] = {value[4], value[5], value[6], value[7]};
  }
}

// CTAs that an SM holds.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || \
    __CUDA_ARCH__ / 10 == 100
constexpr int kSmCtas = 32;
#elif __CUDA_ARCH__ < 890
constexpr int kSmCtas = 16;
#else
constexpr int kSmCtas = 24;
#endif

// For one query head of each key/value head. Lanes take 8 columns each, and a warp as many keys at
// a time as it has lanes for. Registers are bounded so that an SM holds kWarpsPerSm warps with 8
// loads of keys, and as many of values, ahead, or twice as many with 4. More of the former would
// not fit, which matters where CTAs are few: they start while the previous kernel still has part of
// the SMs, and seem to crowd on those that are free.
template <int kHeadDim, int kWarps, int kLoads>
__global__ void __launch_bounds__(32 * kWarps,
                                  std::min(kWarpsPerSm * 8 / (kLoads * kWarps), kSmCtas))
    attention_decode_single_kernel(AttentionCuda p, AttentionSplits splits) {
  const Work work(p, splits);
  const KvRows rows = begin_work(p, work);
  if (!work.exists()) return;
  const int begin = work.begin, end = work.end;

  constexpr int kLanes = kHeadDim / kPiece;  // of a row
  constexpr int kRows = 32 / kLanes;         // that a warp loads at once
  constexpr int kStep = kRows * kLoads;
  static_assert(kKvBlock % kStep == 0, "the keys of a step are in one block");
  const int warp = warp_of<kWarps>(), lane = static_cast<int>(threadIdx.x) % 32;
  const int column = lane % kLanes * kPiece;
  const bool inside = column < p.head_dim;
  // The lane's row of those loaded at once; behind all keys where the head has no such columns.
  const int first_row = inside ? lane / kLanes : 1 << 30;
  // 32 bits, of which a step has few enough, take fewer registers than 64.
  const int stride = static_cast<int>(p.kv_stride);
  const int lane_at = lane / kLanes * stride + work.kv_head * static_cast<int>(p.head_dim) + column;
  const auto load = [&](uint4(&to)[kLoads], const __nv_bfloat16* from, int row, int first) {
    from += int64_t{row} * stride + lane_at;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int key = first + u * kRows + first_row;
      to[u] = load_if(key >= begin && key < end, from + u * kRows * stride);
    }
  };
  int first = begin / kStep * kStep + warp * kStep;
  uint4 k[kLoads], v[kLoads];
  int row = rows.row(first);
  load(k, p.k, row, first);
  load(v, p.v, row, first);
  float q[kPiece];
  unpack(q, load_if(inside, p.q + work.q_row * p.q_stride + work.head(0) * p.head_dim + column));
  const float scale = kLog2E * rsqrtf(static_cast<float>(p.head_dim));
#pragma unroll
  for (int i = 0; i < kPiece; ++i) q[i] *= scale;

  // Over the keys of the lane's row of each step: the largest score (base 2), and sums.
  float top = -INFINITY, sum = 0.0f, value[kPiece] = {};
  for (; first < end; first += kWarps * kStep) {
    const int next = first + kWarps * kStep;
    row = rows.row(next);
    float score[kLoads];
    const float top_before = top;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      float of_key[kPiece];
      unpack(of_key, k[u]);
      score[u] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) score[u] = fmaf(q[i], of_key[i], score[u]);
    }
    load(k, p.k, row, next);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        score[u] += __shfl_xor_sync(0xffffffffu, score[u], offset);
      }
      const int key = first + u * kRows + first_row;
      if (key < begin || key >= end) score[u] = -INFINITY;
      top = fmaxf(top, score[u]);
    }
    const float finite_top = top == -INFINITY ? 0.0f : top;  // no key of this lane's row yet
    const float shrink = exp2f(top_before - finite_top);
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) value[i] *= shrink;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const float weight = exp2f(score[u] - finite_top);
      sum += weight;
      float of_key[kPiece];
      unpack(of_key, v[u]);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) value[i] = fmaf(weight, of_key[i], value[i]);
    }
    load(v, p.v, row, next);
  }

  __shared__ WarpResults<kHeadDim, kWarps, 1> results;
  gather(results, top, sum, value);
  __syncthreads();
  results.finish(p, splits, work);
}

route::AttentionHeads heads_of(const AttentionCuda& p) {
  return {.heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .eight_bits = p.k8.data != nullptr};
}

// The kernel for the problem's heads and a division of kWarps warps.
template <int kHeadDim, int kWarps>
auto kernel_for(const AttentionCuda& p, const AttentionSplits& splits) {
  if (p.k8.data != nullptr) return attention_decode_group_kernel<kHeadDim, kWarps, int8_t>;
  if (p.heads != p.kv_heads) {
    return attention_decode_group_kernel<kHeadDim, kWarps, __nv_bfloat16>;
  }
  if constexpr (kWarps == 1) {
    if (splits.loads == 4) return attention_decode_single_kernel<kHeadDim, kWarps, 4>;
  }
  return attention_decode_single_kernel<kHeadDim, kWarps, 8>;
}

// Launches CTAs of kWarps warps if the division has so many, or else of half as many.
template <int kHeadDim, int kWarps = route::attention_most_warps(kHeadDim)>
cudaError_t launch(const AttentionCuda& p, const AttentionSplits& splits, cudaStream_t stream) {
  if (splits.warps == kWarps) {
    const dim3 grid(static_cast<unsigned>(splits.count),
                    static_cast<unsigned>(route::attention_ctas(heads_of(p))),
                    static_cast<unsigned>(p.sequences.count));
    return gpu::launch_dependent(kernel_for<kHeadDim, kWarps>(p, splits), grid, 32 * kWarps, 0,
                                 stream, p, splits);
  }
  if constexpr (kWarps > 1) {
    return launch<kHeadDim, kWarps / 2>(p, splits, stream);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace

AttentionDivision attention_division(const AttentionCuda& p, int64_t max_kv_len,
                                     int multiprocessors) {
  return route::attention_division(heads_of(p), p.sequences.count, max_kv_len, multiprocessors);
}

cudaError_t launch_attention_decode(const AttentionCuda& p, const AttentionSplits& splits,
                                    cudaStream_t stream) {
  if (p.sequences.tables == nullptr ||
      splits.count < route::attention_fewest_splits(p.sequences.max_kv_len)) {
    return cudaErrorInvalidValue;
  }
  if (p.head_dim <= 64) return launch<64>(p, splits, stream);
  if (p.head_dim <= 128) return launch<128>(p, splits, stream);
  return launch<256>(p, splits, stream);
}

}  // namespace twell
