// SPDX-License-Identifier: Apache-2.0
// The attention of the kernel of all layers (decode_layers_sm90.cu).
// The work is cut into items: the query heads of one key head, at most kQueries, over one segment
// of their sequence's keys, which are read once for all of these queries. CTAs take items
// round-robin. A sequence's segments depend on its own length alone, so that its result does not
// depend on its neighbours. A sequence of one segment gives the attended values at once. Segments
// of longer ones are merged by all CTAs, each for a share of the values, and not by the readers of
// attended values, all of which need all of them.
#pragma once

#include <type_traits>

#include "twell/gpu/byte_pair.cuh"
#include "twell/gpu/tagged.cuh"
#include "twell/ops/decode/decode_ffn_sm90.cuh"
#include "twell/ops/decode/decode_layers.h"
#include "twell/ops/skinny/skinny_gemm.cuh"

namespace twell::decode {
namespace {

using namespace skinny_gemm;
using gpu::bf16x2;
using gpu::scaled;
using gpu::to_floats;

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kQueries = 8;  // columns of mma_16x8x16
// Keys of a sequence per segment, at least. Merging segments costs two accesses to the L2 in turn,
// in which an SM reads some 500 keys of 64 columns; wider heads take a step of the loop for every
// 64 keys, so that they gain by more segments (bench/results/2026-11-23-h200-attend.txt).
__host__ __device__ constexpr int least_segment(int head_dim) { return head_dim <= 64 ? 256 : 64; }

// The query heads of a key head, in parts of at most kQueries.
struct HeadParts {
  int share, parts, queries;  // query heads per key head, parts of them, query heads per part
  int items;                  // of all key heads, per segment
  int least_keys;             // per segment
  __host__ __device__ HeadParts(int heads, int kv_heads, int head_dim)
      : share(heads / kv_heads),
        parts((share + kQueries - 1) / kQueries),
        queries((share + parts - 1) / parts),
        items(kv_heads * parts),
        least_keys(least_segment(head_dim)) {}
  // Segments of a sequence of this length, at most: the items of one sequence fit the CTAs.
  __host__ __device__ int most_segments(int64_t length, int ctas) const {
    const int64_t wanted = (length + least_keys - 1) / least_keys, fit = ctas / items;
    const int64_t most = wanted < fit ? wanted : fit;
    return most > 1 ? static_cast<int>(most) : 1;
  }
};

// The query heads of a part, over one segment of keys.
struct AttendItem {
  int token, head, queries, kv_head;  // head: the first query head
  int segment, begin, end, newest;    // keys [begin, end); the token's own key
};

// The sequences of a call, in shared memory.
struct BatchShared {
  int32_t kv_len[kMaxDecodeTokens];
  int32_t segments[kMaxDecodeTokens], segment_keys[kMaxDecodeTokens];
  int64_t cache_rows[kMaxDecodeTokens], kv_begin[kMaxDecodeTokens];
  float cos[kMaxDecodeTokens][64], sin[kMaxDecodeTokens][64];  // of the tokens' positions
  // This CTA's items, assigned round-robin over all sequences, with their first blocks of keys.
  // They are the same in every layer. Divisions would delay each layer's keys, and so would loads
  // from the tables, which weights that pass through the L2 cache evict.
  static constexpr int kItems = kMaxDecodeTokens, kBlocks = 8;
  int items;
  AttendItem item[kItems];
  int32_t blocks[kItems][kBlocks];

  // All threads call this; the caller synchronises.
  __device__ __forceinline__ void load(const DecodeLayers& p) {
    const int thread = static_cast<int>(threadIdx.x), half = p.head_dim / 2;
    if (thread < p.tokens) {
      const int keys = p.kv_len[thread];
      kv_len[thread] = keys;
      cache_rows[thread] = p.cache_rows[thread];
      kv_begin[thread] = p.kv_begin[thread];
      const HeadParts heads(p.heads, p.kv_heads, p.head_dim);
      const int most = heads.most_segments(keys, static_cast<int>(gridDim.x));
      const int used = (keys + kKvBlock - 1) / kKvBlock;
      segment_keys[thread] = (used + most - 1) / most * kKvBlock;
      segments[thread] = (keys + segment_keys[thread] - 1) / segment_keys[thread];
    }
    if (thread == 0) items = 0;
    for (int i = thread; i < p.tokens * half; i += static_cast<int>(blockDim.x)) {
      const int64_t at = int64_t{p.positions[i / half]} * half + i % half;
      cos[i / half][i % half] = p.cos[at];
      sin[i / half][i % half] = p.sin[at];
    }
  }
  // Call it once load() is done; the caller synchronises before and after.
  __device__ __forceinline__ void find_items(const DecodeLayers& p);
};

// A thread finds an item and loads one of its blocks.
__device__ __forceinline__ void BatchShared::find_items(const DecodeLayers& p) {
  const int number = static_cast<int>(threadIdx.x) / kBlocks;
  const int block = static_cast<int>(threadIdx.x) % kBlocks;
  if (number >= kItems) return;
  const HeadParts heads(p.heads, p.kv_heads, p.head_dim);
  int token = 0, at = static_cast<int>(blockIdx.x) + number * static_cast<int>(gridDim.x);
  for (; token < p.tokens && at >= segments[token] * heads.items; ++token) {
    at -= segments[token] * heads.items;
  }
  if (token == p.tokens) return;
  const int segment = at / heads.items, part = at % heads.items;
  const int kv_head = part / heads.parts, first = part % heads.parts * heads.queries;
  const int begin = segment * segment_keys[token];
  const int end = min(kv_len[token], begin + segment_keys[token]);
  if (block == 0) {
    atomicMax(&items, number + 1);
    item[number] = {token,
                    kv_head * heads.share + first,
                    min(heads.queries, heads.share - first),
                    kv_head,
                    segment,
                    begin,
                    end,
                    kv_len[token] - 1};
  }
  if (begin + block * kKvBlock < end) {
    blocks[number][block] = p.tables[kv_begin[token] + begin / kKvBlock + block];
  }
}

// Prefetches the keys and values of this CTA's item into the L2 cache, by one warp, in sectors:
// bulk copies of whole rows by other CTAs do not shorten the wait. More tokens or keys would delay
// the weights (bench/results/2026-11-23-h200-attend.txt).
template <typename Kv>
__device__ __forceinline__ void prefetch(const DecodeLayers& p, int layer_number,
                                         const BatchShared& batch) {
  constexpr int kSector = 32 / static_cast<int>(sizeof(Kv)), kMostKeys = 256;
  static_assert(kMostKeys <= BatchShared::kBlocks * kKvBlock);
  const DecodeLayer& layer = p.layer[layer_number];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int sectors = sizeof(Kv) == 1 ? (p.head_dim + kSector - 1) / kSector : p.head_dim / kSector;
  if (p.tokens > 1 || batch.items == 0) return;
  const AttendItem& item = batch.item[0];
  const int keys = min(item.end, item.newest) - item.begin;
  if (keys > kMostKeys) return;
#pragma unroll 1
  for (int i = lane; i < keys * sectors; i += 32) {
    const int key = i / sectors;
    const int64_t row = kv_row(batch.blocks[0][key / kKvBlock], key);
    const int64_t from = (row * p.kv_heads + item.kv_head) * p.head_dim + i % sectors * kSector;
    if constexpr (sizeof(Kv) == 1) {
      gpu::prefetch_around(p.bytes[layer_number].keys.data + from);
      gpu::prefetch_around(p.bytes[layer_number].values.data + from);
    } else {
      gpu::prefetch_around(layer.keys + from);
      gpu::prefetch_around(layer.values + from);
    }
  }
  if constexpr (sizeof(Kv) == 1) {
    constexpr int kScales = 8;  // of a sector
#pragma unroll 1
    for (int key = lane * kScales; key < keys; key += 32 * kScales) {
      const int64_t at =
          kv_scale(kv_row(batch.blocks[0][key / kKvBlock], key), item.kv_head, p.kv_heads);
      gpu::prefetch_around(p.bytes[layer_number].keys.scales + at);
      gpu::prefetch_around(p.bytes[layer_number].values.scales + at);
    }
  }
}

// kColumns: 64 or 128, at least head_dim.
template <int kColumns>
struct AttendShared {
  static constexpr int kAtOnce = 128 / kColumns;  // queries whose results are merged together
  alignas(16) __nv_bfloat16 token[kQueries + 2][kColumns];  // queries, the new key and value
  alignas(16) float value[kWarps][kAtOnce][kColumns];
  float top[kWarps][kQueries], sum[kWarps][kQueries];
};

// The new key and value in 8 bits.
template <int kColumns>
struct NewBytesShared {
  alignas(8) int8_t values[2][kColumns];
  float scale[2];
};
struct NoNewBytes {};

// Sixteen bytes that were written before the kernel began, or zeros. The condition is an operand of
// one instruction: were the address computed under it, its registers would be taken all through the
// loop over layers.
__device__ __forceinline__ uint4 load_or_zero(const __nv_bfloat16* from, bool exists) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(static_cast<int>(exists)));
  return v;
}
// Eight bytes.
__device__ __forceinline__ uint2 load_or_zero(const int8_t* from, bool exists) {
  uint2 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %3, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0;\n"
      "@p ld.global.cg.v2.b32 {%0, %1}, [%2]; }"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(from), "r"(static_cast<int>(exists)));
  return v;
}

// Values 2 i and 2 i + 1 of a piece, in bf16.
__device__ __forceinline__ uint32_t pair_of(const uint4& piece, int i) {
  return gpu::word(piece, i);
}
__device__ __forceinline__ uint32_t pair_of(const uint2& piece, int i) {
  return gpu::bytes_to_bf16x2(i < 2 ? piece.x : piece.y, i % 2);
}

// Attends to this CTA's items of a layer. Warps share each block of an item's keys; they load keys
// and values straight into operands of mma.sync, which the queries are the columns of, and ask for
// the next ones as soon as these are multiplied. Softmax weights are rounded to bf16.
//
// A warp takes eight keys of a block. Lane 4 r + c holds the 16-byte pieces c, c + 4, ... of key r:
// a product's sum does not depend on which values count as its k-th, if both operands agree. The
// lane also holds the pieces r, r + 8 of the values of keys 2c and 2c + 1, which are the k-th terms
// that the instruction expects from it.
//
// Of keys and values in 8 bits (Kv is int8_t), pieces have eight bytes. A key's scale multiplies
// its scores, a value's its softmax weight, which is rounded to bf16 then.
template <int kColumns, typename Kv = __nv_bfloat16>
class Attention {
 public:
  static constexpr bool kBytes = sizeof(Kv) == 1;
  using NewBytes = std::conditional_t<kBytes, NewBytesShared<kColumns>, NoNewBytes>;

  __device__ __forceinline__ Attention(const DecodeLayers& p, int layer, uint32_t tag,
                                       const BatchShared& batch, AttendShared<kColumns>& shared,
                                       NewBytes& new_bytes)
      : p_(p),
        layer_(p.layer[layer]),
        bytes_(p.bytes[layer]),
        batch_(batch),
        shared_(shared),
        new_bytes_(new_bytes),
        tag_(tag),
        thread_(gpu::opaque(static_cast<int>(threadIdx.x))),
        lane_(thread_ % 32),
        head_dim_(gpu::opaque(p.head_dim)) {}

  // All threads that multiply call this, whether the CTA has items or not.
  __device__ __forceinline__ void run() {
    const int items = batch_.items;
    if (items > 0) begin(0);
    sync_threads();  // the product before may still read the same shared memory
#pragma unroll 1
    for (int number = 0; number < items; ++number) {
      const AttendItem& item = batch_.item[number];
      fetch_token(item);
      attend();
      if (number + 1 < items) begin(number + 1);  // before the merge, to hide the latency
      merge_warps(item);
    }
    merge_segments();
  }

 private:
  // A step is as many blocks of keys as registers hold; a warp has eight keys of each, which are
  // half of an operand's rows.
  static constexpr int kHalves = kColumns == 64 ? 2 : 1, kOperands = (kHalves + 1) / 2;
  static constexpr int kStep = kHalves * kKvBlock;
  static_assert(kKvBlock == 8 * kWarps);
  static constexpr int kKeyPieces = kColumns / 32, kValuePieces = kColumns / 64;
  using Piece = std::conditional_t<kBytes, uint2, uint4>;  // of eight values

  // Loads the item's first keys and values.
  __device__ __forceinline__ void begin(int number) {
    const AttendItem& item = batch_.item[number];
    number_ = number;
    newest_ = item.newest;
    begin_ = item.begin;
    end_ = item.end;
    kv_head_ = item.kv_head;
    find_blocks(begin_);
    load_keys(begin_);
    load_values(begin_);
    find_blocks(begin_ + kStep);
  }

  // The warp's first key of the step that begins with key `base`, in the i-th of its blocks.
  __device__ __forceinline__ int first_of(int base, int i) const {
    return base + i * kKvBlock + thread_ / 32 * 8;
  }
  // Looks up the step's blocks.
  __device__ __forceinline__ void find_blocks(int base) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int first = base + i * kKvBlock, at = (first - begin_) / kKvBlock;
      if (first >= end_) continue;
      const int64_t table = batch_.kv_begin[batch_.item[number_].token];
      block_[i] = at < BatchShared::kBlocks ? batch_.blocks[number_][at]
                                            : __ldg(p_.tables + table + first / kKvBlock);
    }
  }
  // Loads from the cache; what it does not hold becomes zero, the newest key too, whose row another
  // CTA may be writing.
  __device__ __forceinline__ Piece load(const Kv* from, int base, int i, int row,
                                        int column) const {
    const int key = first_of(base, i) + row;
    const int64_t at =
        int64_t{kv_row(block_[i], key)} * (p_.kv_heads * head_dim_) + kv_head_ * head_dim_ + column;
    return load_or_zero(from + at, key < min(end_, newest_) && column < head_dim_);
  }
  __device__ __forceinline__ const Kv* rows(bool values) const {
    if constexpr (kBytes)
      return (values ? bytes_.values : bytes_.keys).data;
    else
      return values ? layer_.values : layer_.keys;
  }
  // The scales of this lane's keys, or of their values, of a step; 0 where the cache has none.
  __device__ __forceinline__ void load_scales(float (&scales)[kHalves], const float* from,
                                              int base) const {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int key = first_of(base, i) + key_row();
      scales[i] = key < min(end_, newest_)
                      ? __ldcg(from + kv_scale(kv_row(block_[i], key), kv_head_, p_.kv_heads))
                      : 0.0f;
    }
  }
  __device__ __forceinline__ void load_keys(int base) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
        key_[i][j] = load(rows(false), base, i, key_row(), key_column(j));
      }
    }
    if constexpr (kBytes) load_scales(key_scale_, bytes_.keys.scales, base);
  }
  __device__ __forceinline__ void load_values(int base) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kValuePieces; ++j) {
        value_[i][j] = load(rows(true), base, i, value_row(j), value_column(j));
      }
    }
    if constexpr (kBytes) load_scales(value_scale_, bytes_.values.scales, base);
  }
  // What this lane holds of the warp's keys and values in a block.
  __device__ __forceinline__ int key_row() const { return lane_ / 4; }
  __device__ __forceinline__ int key_column(int j) const { return (lane_ % 4 + j * 4) * 8; }
  __device__ __forceinline__ int value_row(int j) const { return lane_ % 4 * 2 + j % 2; }
  __device__ __forceinline__ int value_column(int j) const { return (lane_ / 4 + j / 2 * 8) * 8; }

  // Waits for the item's queries and the new token's key and value, and copies them to shared
  // memory, padded with zeros.
  __device__ __forceinline__ void fetch_token(const AttendItem& item) {
    constexpr int kHalf = kColumns / 2, kRows = kQueries + 2;
    constexpr int kMost = (kRows * kHalf + kThreads - 1) / kThreads;
    const int half = head_dim_ / 2, at = thread_ % kHalf;
    const gpu::Tagged* words =
        p_.workspace.qkv + item.token * (p_.heads + 2 * p_.kv_heads) * half + at;
    const auto row = [&](int i) { return (thread_ + i * kThreads) / kHalf; };
    const auto wanted = [&](int i) {
      return at < half && (row(i) < item.queries || (row(i) >= kQueries && row(i) < kRows));
    };
    gpu::Tagged seen[kMost];
    gpu::wait_all_tagged(
        seen, wanted,
        [&](int i) {
          const int kv = row(i) - kQueries;
          const int head = kv < 0 ? item.head + row(i) : p_.heads + kv * p_.kv_heads + item.kv_head;
          return gpu::load_tagged(words + head * half);
        },
        tag_);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (row(i) >= kRows) break;
      const uint32_t v = wanted(i) ? static_cast<uint32_t>(seen[i]) : 0;
      const int low = at < half ? at : 2 * at, high = at < half ? at + half : low + 1;
      shared_.token[row(i)][low] = __ushort_as_bfloat16(static_cast<unsigned short>(v & 0xffff));
      shared_.token[row(i)][high] = __ushort_as_bfloat16(static_cast<unsigned short>(v >> 16));
    }
    sync_threads();
    if constexpr (kBytes) {
      if (thread_ < 64) round_new(item, thread_ / 32);
      sync_threads();
    }
  }
  __device__ __forceinline__ uint4 of_token(int row, int column) const {
    return gpu::load_shared16(gpu::smem_address(&shared_.token[row][column]));
  }
  // The new key (0) or value (1), a piece of it.
  __device__ __forceinline__ Piece of_new(int which, int column) const {
    if constexpr (kBytes) {
      return *reinterpret_cast<const uint2*>(&new_bytes_.values[which][column]);
    } else {
      return of_token(kQueries + which, column);
    }
  }
  // Rounds the new key (0) or value (1) to 8 bits as ops/attention/kv_bytes_cuda.h does. Every item
  // of the head does; the one with the newest key and the head's first queries stores it. One warp.
  __device__ __forceinline__ void round_new(const AttendItem& item, int which) const {
    constexpr int kOwn = kColumns / 32;
    constexpr uint32_t kNotFinite = 0x7f80u;  // bf16 from these bits on, without the sign
    uint32_t most = 0;
    float value[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const __nv_bfloat16 v = shared_.token[kQueries + which][lane_ * kOwn + i];
      most = max(most, __bfloat16_as_ushort(v) & 0x7fffu);
      value[i] = __bfloat162float(v);
    }
    most = __reduce_max_sync(~0u, most);
    const bool finite = most < kNotFinite;
    const float magnitude = __uint_as_float(most << 16);
    const float steps = finite && most > 0 ? 127.0f / magnitude : 0.0f;
    const float scale = finite ? magnitude / 127.0f : NAN;
    const bool stores = item.end > item.newest && item.head % (p_.heads / p_.kv_heads) == 0;
    const KvBytes& to = which == 0 ? bytes_.keys : bytes_.values;
    const int64_t row = batch_.cache_rows[item.token];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int column = lane_ * kOwn + i;
      const float rounded = finite ? fminf(fmaxf(value[i] * steps, -127.0f), 127.0f) : 0.0f;
      const auto byte = static_cast<int8_t>(__float2int_rn(rounded));
      new_bytes_.values[which][column] = byte;
      if (stores && column < head_dim_) {
        to.data[(row * p_.kv_heads + item.kv_head) * head_dim_ + column] = byte;
      }
    }
    if (lane_ != 0) return;
    new_bytes_.scale[which] = scale;
    if (stores) to.scales[kv_scale(row, item.kv_head, p_.kv_heads)] = scale;
  }

  __device__ __forceinline__ void attend() {
    const float scale = kLog2E * rsqrtf(static_cast<float>(head_dim_));
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      top_[q] = -INFINITY;
      sum_[q] = 0.0f;
    }
#pragma unroll
    for (auto& piece : attended_) {
#pragma unroll
      for (auto& columns : piece) {
#pragma unroll
        for (float& v : columns) v = 0.0f;
      }
    }
#pragma unroll 1
    for (int base = begin_; first_of(base, 0) < end_; base += kStep) {
      if (newest_ < end_ && base + kStep >= end_) add_newest(base);
      float score[kOperands][4] = {};
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
        const uint4 query = of_token(lane_ / 4, key_column(j));
#pragma unroll
        for (int o = 0; o < kOperands; ++o) {
          const Piece low = key_[2 * o][j];
          const Piece high = 2 * o + 1 < kHalves ? key_[(2 * o + 1) % kHalves][j] : Piece{};
          gpu::mma_16x8x16(score[o], pair_of(low, 0), pair_of(high, 0), pair_of(low, 1),
                           pair_of(high, 1), query.x, query.y);
          gpu::mma_16x8x16(score[o], pair_of(low, 2), pair_of(high, 2), pair_of(low, 3),
                           pair_of(high, 3), query.z, query.w);
        }
      }
      if constexpr (kBytes) {
#pragma unroll
        for (int o = 0; o < kOperands; ++o) {
#pragma unroll
          for (int i = 0; i < 4; ++i) score[o][i] *= key_scale_[(2 * o + i / 2) % kHalves];
        }
      }
      load_keys(base + kStep);
      weigh(score, base, scale);
#pragma unroll
      for (int o = 0; o < kOperands; ++o) add_values(o, score[o]);
      load_values(base + kStep);
      find_blocks(base + 2 * kStep);
    }
  }

  // Puts the new token's key and value, which the cache may not hold yet, where they belong.
  __device__ __forceinline__ void add_newest(int base) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int row = newest_ - first_of(base, i);
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
        if (key_row() == row) key_[i][j] = of_new(0, key_column(j));
      }
#pragma unroll
      for (int j = 0; j < 2 * kValuePieces; ++j) {
        if (value_row(j) == row) value_[i][j] = of_new(1, value_column(j));
      }
      if constexpr (kBytes) {
        if (key_row() == row) {
          key_scale_[i] = new_bytes_.scale[0];
          value_scale_[i] = new_bytes_.scale[1];
        }
      }
    }
  }

  // Makes scores, of key r of two blocks and queries 2c and 2c + 1, softmax weights, and shrinks
  // what was added so far to the same maximum.
  __device__ __forceinline__ void weigh(float (&score)[kOperands][4], int base, float scale) {
    float top[2] = {top_[0], top_[1]};
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = 2 * o + i / 2;
        const bool exists = half < kHalves && first_of(base, half) + key_row() < end_;
        score[o][i] = exists ? score[o][i] * scale : -INFINITY;
        top[i % 2] = fmaxf(top[i % 2], score[o][i]);
      }
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
#pragma unroll
      for (float& t : top) t = fmaxf(t, __shfl_xor_sync(~0u, t, offset));
    }
    float shrink[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      shrink[q] = exp2f(top_[q] - top[q]);  // the warp has a key, so that top is finite
      top_[q] = top[q];
      sum_[q] *= shrink[q];
    }
#pragma unroll
    for (auto& piece : attended_) {
#pragma unroll
      for (auto& columns : piece) {
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] *= shrink[i % 2];
      }
    }
#pragma unroll
    for (auto& of_keys : score) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_keys[i] = exp2f(of_keys[i] - top[i % 2]);
    }
  }

  // Adds the values of two blocks, weighted.
  __device__ __forceinline__ void add_values(int o, const float (&weight)[4]) {
    uint32_t low, high;
    if constexpr (kBytes) {
      const float first = value_scale_[2 * o];
      const float second = 2 * o + 1 < kHalves ? value_scale_[(2 * o + 1) % kHalves] : 0.0f;
      low = bf16x2(weight[0] * first, weight[1] * first);
      high = bf16x2(weight[2] * second, weight[3] * second);
      sum_[0] += weight[0] + weight[2];
      sum_[1] += weight[1] + weight[3];
    } else {
      low = bf16x2(weight[0], weight[1]), high = bf16x2(weight[2], weight[3]);
      const float2 a = to_floats(low), b = to_floats(high);
      sum_[0] += a.x + b.x;
      sum_[1] += a.y + b.y;
    }
    const uint32_t first = gpu::transposed(low), second = gpu::transposed(high);
#pragma unroll
    for (int j = 0; j < kValuePieces; ++j) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = 2 * o + i / 2;
        const Piece v = half < kHalves ? value_[half % kHalves][2 * j + i % 2] : Piece{};
#pragma unroll
        for (int w = 0; w < 4; ++w) words[i][w] = pair_of(v, w);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // Rows of the operand: columns 2w of the pieces, then columns 2w + 1.
        constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;
        gpu::mma_16x8x16(attended_[j][w], __byte_perm(words[0][w], words[1][w], kLow),
                         __byte_perm(words[0][w], words[1][w], kHigh),
                         __byte_perm(words[2][w], words[3][w], kLow),
                         __byte_perm(words[2][w], words[3][w], kHigh), first, second);
      }
    }
  }

  // Merges the warps' results for the item in a fixed order and stores them.
  __device__ __forceinline__ void merge_warps(const AttendItem& item) {
    constexpr int kAtOnce = AttendShared<kColumns>::kAtOnce, kHalf = kColumns / 2;
    const int warp = thread_ / 32, column = lane_ / 4 * 8;
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
#pragma unroll
      for (float& sum : sum_) sum += __shfl_xor_sync(~0u, sum, offset);
    }
    if (lane_ < 4) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        shared_.top[warp][lane_ * 2 + q] = top_[q];
        shared_.sum[warp][lane_ * 2 + q] = sum_[q];
      }
    }
#pragma unroll 1
    for (int first = 0; first < item.queries; first += kAtOnce) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int at = lane_ % 4 * 2 + q - first;
        if (at < 0 || at >= kAtOnce) continue;
#pragma unroll
        for (int j = 0; j < kValuePieces; ++j) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            *reinterpret_cast<float2*>(&shared_.value[warp][at][column + j * 64 + w * 2]) =
                make_float2(attended_[j][w][q], attended_[j][w][q + 2]);
          }
        }
      }
      sync_threads();
      const int at = thread_ / kHalf;
      const int pair = thread_ % kHalf;
      if (at < kAtOnce && first + at < item.queries && pair < head_dim_ / 2) {
        merge_pair(item, first + at, at, pair);
      }
      sync_threads();  // the next queries, or the next item, overwrite `shared`
    }
  }
  // Two columns of a query.
  __device__ __forceinline__ void merge_pair(const AttendItem& item, int query, int at, int pair) {
    float top = -INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared_.top[w][query]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2f(shared_.top[w][query] - top);
      sum = fmaf(weight, shared_.sum[w][query], sum);
      low = fmaf(weight, shared_.value[w][at][pair * 2], low);
      high = fmaf(weight, shared_.value[w][at][pair * 2 + 1], high);
    }
    const DecodeWorkspace& w = p_.workspace;
    const int64_t head = int64_t{item.token} * p_.heads + item.head + query;
    if (batch_.segments[item.token] == 1) {
      gpu::store_tagged(w.attended + head * (head_dim_ / 2) + pair, bf16x2(low / sum, high / sum),
                        tag_);
      return;
    }
    const int64_t slot = head * w.segments + item.segment;
    gpu::store_tagged(w.segment_values + slot * head_dim_ + pair * 2, __float_as_uint(low),
                      __float_as_uint(high), tag_);
    if (pair == 0) {
      gpu::store_tagged(w.segment_sums + slot * 2, __float_as_uint(top), __float_as_uint(sum),
                        tag_);
    }
  }

  // Merges the segments of long sequences, a team of lanes for two columns of a head: a lane takes
  // a segment, or every 32nd; then lanes are added in an order that the size of teams does not
  // change.
  __device__ __forceinline__ void merge_segments() const {
    int most = 1, team = 2;
    for (int token = 0; token < p_.tokens; ++token) most = max(most, batch_.segments[token]);
    if (most == 1) return;
    while (team < min(most, 32)) team *= 2;
    const DecodeWorkspace& w = p_.workspace;
    const int half = head_dim_ / 2, pairs = p_.heads * half;
    const int step = kThreads / team * static_cast<int>(gridDim.x);
    const int own = thread_ / team * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (int base = 0; base < p_.tokens * pairs; base += step) {
      const int unit = min(base + own, p_.tokens * pairs - 1), token = unit / pairs;
      const int head = unit / half, segments = batch_.segments[token];
      float top = -INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
      const auto add = [&](float other_top, float other_sum, float other_low, float other_high) {
        const float new_top = fmaxf(top, other_top);
        const float top_or_0 = new_top == -INFINITY ? 0.0f : new_top;  // no segment so far
        const float mine = exp2f(top - top_or_0), others = exp2f(other_top - top_or_0);
        top = new_top;
        sum = sum * mine + other_sum * others;
        low = low * mine + other_low * others;
        high = high * mine + other_high * others;
      };
#pragma unroll 1
      for (int s = lane_ % team; segments > 1 && s < segments; s += team) {
        const int64_t slot = int64_t{head} * w.segments + s;
        gpu::TaggedPair seen[2];
        gpu::wait_tagged(
            seen, 2,
            [&](int i) {
              return i == 0 ? w.segment_sums + slot * 2
                            : w.segment_values + slot * head_dim_ + unit % half * 2;
            },
            tag_);
        const uint2 sums = gpu::values(seen[0]), values = gpu::values(seen[1]);
        add(__uint_as_float(sums.x), __uint_as_float(sums.y), __uint_as_float(values.x),
            __uint_as_float(values.y));
      }
      __syncwarp();
#pragma unroll 1
      for (int offset = 1; offset < team; offset *= 2) {
        add(__shfl_xor_sync(~0u, top, offset), __shfl_xor_sync(~0u, sum, offset),
            __shfl_xor_sync(~0u, low, offset), __shfl_xor_sync(~0u, high, offset));
      }
      if (lane_ % team == 0 && segments > 1 && base + own < p_.tokens * pairs) {
        gpu::store_tagged(w.attended + unit, bf16x2(low / sum, high / sum), tag_);
      }
    }
  }

  const DecodeLayers& p_;
  const DecodeLayer& layer_;
  const DecodeLayerBytes& bytes_;
  const BatchShared& batch_;
  AttendShared<kColumns>& shared_;
  NewBytes& new_bytes_;
  const uint32_t tag_;
  const int thread_, lane_, head_dim_;
  // The item whose keys are being loaded.
  int begin_ = 0, end_ = 0, newest_ = 0, kv_head_ = 0, number_ = 0;
  int32_t block_[kHalves] = {};  // of the step that is loaded next
  Piece key_[kHalves][kKeyPieces], value_[kHalves][2 * kValuePieces];
  float key_scale_[kHalves], value_scale_[kHalves];  // in 8 bits
  // The item at hand: queries 2c and 2c + 1, columns of the pieces r, r + 8.
  float top_[2], sum_[2], attended_[kValuePieces][4][4];
};

// Waits for the attended values of all heads and stores them in x_shared, padded with zeros to a
// whole block; beside weights in e4m3 (kHalves) as f16, times a power of two for each token. All
// threads that multiply call it. between() is called behind a barrier that follows whatever the
// step before did.
template <int kTokens, int kBlock, bool kHalves, typename Scales, typename Between>
__device__ __forceinline__ void stage_attended(const DecodeLayers& p, uint32_t tag,
                                               uint8_t* x_shared, int pitch, Scales& scales,
                                               const Between& between) {
  constexpr int kTeam = kThreads / kTokens, kAtOnce = kTokens == 1 ? 2 : 8;
  const int token = static_cast<int>(threadIdx.x) / kTeam;
  constexpr int kQuads = kBlock / 4;
  const int quads = p.heads * p.head_dim / 4, padded = (quads + kQuads - 1) / kQuads * kQuads;
  const int first = static_cast<int>(threadIdx.x) % kTeam;
  auto* const row = reinterpret_cast<uint2*>(x_shared + token * pitch);
  uint32_t most = 0;
  if (token < p.tokens) {
    const gpu::Tagged* words = p.workspace.attended + int64_t{token} * quads * 2;
    for (int base = first; base < padded; base += kTeam * kAtOnce) {
      gpu::TaggedPair seen[kAtOnce];
      const int count = base < quads ? min((quads - base - 1) / kTeam + 1, kAtOnce) : 0;
      gpu::wait_tagged(
          seen, count, [&](int i) { return words + (base + i * kTeam) * 2; }, tag);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * kTeam;
        if (at >= padded) break;
        const uint2 v = i < count ? gpu::values(seen[i]) : uint2{};
        if constexpr (kHalves) most = max(most, max(gpu::most_bits(v.x), gpu::most_bits(v.y)));
        row[at] = v;
      }
    }
  }
  if constexpr (kHalves) store_most<kTokens>(most, scales);
  sync_threads();
  if constexpr (kHalves) {
    between();
    const gpu::HalfScale half(load_most<kTokens>(scales));
    if (first == 0) scales.inverse[token] = half.inverse;
    if (token < p.tokens) {
      for (int at = first; at < padded; at += kTeam) {  // the values that this thread stored
        row[at] = {half.halves(row[at].x), half.halves(row[at].y)};
      }
    }
    sync_threads();
  }
}

}  // namespace
}  // namespace twell::decode
