// SPDX-License-Identifier: Apache-2.0
// The kernel of all layers: a persistent CTA per SM, launched cooperatively. A layer's steps, each
// of which takes what all CTAs made in the one before:
//   norm, q/k/v, rotation, cache | attention | merge of segments | output projection, residual |
//   norm, gate, up, down of the neurons a CTA owns | sum over CTAs, residual
//
// One warp of a CTA reads the weights in the order of use through a ring buffer (skinny_gemm.cuh),
// ahead of the eight warps that multiply and across the waits between steps.
//
// CTAs hand each other words that hold a value and a tag (gpu/tagged.cuh): the number of the
// layer, counted over this call and all before it. Every place in memory exists once, so a layer
// may only write to it after all CTAs have read what the layer before put there. That holds because
//   - the last step of a layer waits for every CTA's part of y, or for its word that it has none,
//     which a CTA writes after all its other reads of the layer, except those of the sum over CTAs;
//   - every step of the next layer waits for that sum, directly or through the steps before it.
#include <algorithm>
#include <type_traits>

#include "twell/base/carver.h"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/tagged.cuh"
#include "twell/ops/decode/decode_layers.h"
#include "twell/ops/skinny/skinny_gemm.cuh"

namespace twell {
namespace decode {
namespace {

using namespace skinny_gemm;
using gpu::bf16x2;
using gpu::scaled;
using gpu::to_floats;

// --- Attention ---
// The work is cut into items: the query heads of one key head, at most kQueries, over one segment
// of their sequence's keys, which are read once for all of these queries. CTAs take items
// round-robin. A sequence's segments depend on its own length alone, so that its result does not
// depend on its neighbours. A sequence of one segment gives the attended values at once. Segments
// of longer ones are merged by all CTAs, each for a share of the values, and not by the readers of
// attended values, all of which need all of them.

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
__device__ __forceinline__ void prefetch(const DecodeLayers& p, const DecodeLayer& layer,
                                         const BatchShared& batch) {
  constexpr int kSector = 16, kMostKeys = 256;
  static_assert(kMostKeys <= BatchShared::kBlocks * kKvBlock);
  const int lane = static_cast<int>(threadIdx.x) % 32, sectors = p.head_dim / kSector;
  if (p.tokens > 1 || batch.items == 0) return;
  const AttendItem& item = batch.item[0];
  const int keys = min(item.end, item.newest) - item.begin;
  if (keys > kMostKeys) return;
#pragma unroll 1
  for (int i = lane; i < keys * sectors; i += 32) {
    const int key = i / sectors;
    const int64_t row = kv_row(batch.blocks[0][key / kKvBlock], key);
    const int64_t from = (row * p.kv_heads + item.kv_head) * p.head_dim + i % sectors * kSector;
    gpu::prefetch_around(layer.keys + from);
    gpu::prefetch_around(layer.values + from);
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

// Attends to this CTA's items of a layer. Warps share each block of an item's keys; they load keys
// and values straight into operands of mma.sync, which the queries are the columns of, and ask for
// the next ones as soon as these are multiplied. Softmax weights are rounded to bf16.
//
// A warp takes eight keys of a block. Lane 4 r + c holds the 16-byte pieces c, c + 4, ... of key r:
// a product's sum does not depend on which values count as its k-th, if both operands agree. The
// lane also holds the pieces r, r + 8 of the values of keys 2c and 2c + 1, which are the k-th terms
// that the instruction expects from it.
template <int kColumns>
class Attention {
 public:
  __device__ __forceinline__ Attention(const DecodeLayers& p, const DecodeLayer& layer,
                                       uint32_t tag, const BatchShared& batch,
                                       AttendShared<kColumns>& shared)
      : p_(p),
        layer_(layer),
        batch_(batch),
        shared_(shared),
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
  __device__ __forceinline__ uint4 load(const __nv_bfloat16* from, int base, int i, int row,
                                        int column) const {
    const int key = first_of(base, i) + row;
    const int64_t at =
        int64_t{kv_row(block_[i], key)} * (p_.kv_heads * head_dim_) + kv_head_ * head_dim_ + column;
    return load_or_zero(from + at, key < min(end_, newest_) && column < head_dim_);
  }
  __device__ __forceinline__ void load_keys(int base) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
        key_[i][j] = load(layer_.keys, base, i, key_row(), key_column(j));
      }
    }
  }
  __device__ __forceinline__ void load_values(int base) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kValuePieces; ++j) {
        value_[i][j] = load(layer_.values, base, i, value_row(j), value_column(j));
      }
    }
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
  }
  __device__ __forceinline__ uint4 of_token(int row, int column) const {
    return gpu::load_shared16(gpu::smem_address(&shared_.token[row][column]));
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
          const uint4 low = key_[2 * o][j];
          const uint4 high = 2 * o + 1 < kHalves ? key_[(2 * o + 1) % kHalves][j] : uint4{};
          gpu::mma_16x8x16(score[o], low.x, high.x, low.y, high.y, query.x, query.y);
          gpu::mma_16x8x16(score[o], low.z, high.z, low.w, high.w, query.z, query.w);
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
        if (key_row() == row) key_[i][j] = of_token(kQueries, key_column(j));
      }
#pragma unroll
      for (int j = 0; j < 2 * kValuePieces; ++j) {
        if (value_row(j) == row) value_[i][j] = of_token(kQueries + 1, value_column(j));
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
    const uint32_t low = bf16x2(weight[0], weight[1]), high = bf16x2(weight[2], weight[3]);
    const float2 a = to_floats(low), b = to_floats(high);
    sum_[0] += a.x + b.x;
    sum_[1] += a.y + b.y;
    const uint32_t first = gpu::transposed(low), second = gpu::transposed(high);
#pragma unroll
    for (int j = 0; j < kValuePieces; ++j) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = 2 * o + i / 2;
        const uint4 v = half < kHalves ? value_[half % kHalves][2 * j + i % 2] : uint4{};
        words[i][0] = v.x;
        words[i][1] = v.y;
        words[i][2] = v.z;
        words[i][3] = v.w;
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
  const BatchShared& batch_;
  AttendShared<kColumns>& shared_;
  const uint32_t tag_;
  const int thread_, lane_, head_dim_;
  // The item whose keys are being loaded.
  int begin_ = 0, end_ = 0, newest_ = 0, kv_head_ = 0, number_ = 0;
  int32_t block_[kHalves] = {};  // of the step that is loaded next
  uint4 key_[kHalves][kKeyPieces], value_[kHalves][2 * kValuePieces];
  // The item at hand: queries 2c and 2c + 1, columns of the pieces r, r + 8.
  float top_[2], sum_[2], attended_[kValuePieces][4][4];
};

// Waits for the attended values of all heads and stores them in x_shared, padded with zeros to a
// whole block. All threads that multiply call it.
template <int kTokens>
__device__ __forceinline__ void stage_attended(const DecodeLayers& p, uint32_t tag,
                                               uint8_t* x_shared, int pitch) {
  constexpr int kTeam = kThreads / kTokens, kAtOnce = kTokens == 1 ? 2 : 8;
  const int token = static_cast<int>(threadIdx.x) / kTeam;
  const int quads = p.heads * p.head_dim / 4, padded = (quads + 7) / 8 * 8;
  if (token < p.tokens) {
    const gpu::Tagged* words = p.workspace.attended + int64_t{token} * quads * 2;
    const int first = static_cast<int>(threadIdx.x) % kTeam;
    for (int base = first; base < padded; base += kTeam * kAtOnce) {
      gpu::TaggedPair seen[kAtOnce];
      const int count = base < quads ? min((quads - base - 1) / kTeam + 1, kAtOnce) : 0;
      gpu::wait_tagged(
          seen, count, [&](int i) { return words + (base + i * kTeam) * 2; }, tag);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * kTeam;
        if (at >= padded) break;
        *reinterpret_cast<uint2*>(x_shared + token * pitch + at * 8) =
            i < count ? gpu::values(seen[i]) : uint2{};
      }
    }
  }
  sync_threads();
}

// --- The feed-forward block behind its gate ---
// A CTA owns the same neurons in every layer: h stays in its shared memory, and what leaves it is
// its part of y, a sum over its neurons. All parts are then added in a fixed order.

// The neurons this CTA owns.
struct Neurons {
  int begin, count;
  __device__ explicit Neurons(int ffn) {
    const auto first = [&](int64_t cta) { return static_cast<int>(cta * ffn / gridDim.x); };
    begin = first(blockIdx.x);
    count = first(blockIdx.x + 1) - begin;
  }
};

// In a dense gated layer, a group is eight neurons: low rows of w_gate, high rows of w_up. In
// others it is 16 neurons' rows of w_gate, or of w_up without a gate.
__device__ __forceinline__ bool paired(const DecodeLayer& layer) {
  return layer.w_gate != nullptr && !layer.sparse;
}
__device__ __forceinline__ bool screened(const DecodeLayers& p, const DecodeLayer& layer) {
  return p.tokens == 1 && layer.sparse && layer.screen.rows != nullptr;
}
__device__ __forceinline__ int ffn_step(const DecodeLayer& layer) {
  return paired(layer) ? kPairs : kGroup;
}

__host__ __device__ inline int down_pitch(int columns) {
  return (columns * 2 + 127) / 128 * 128 + 16;
}

// The residual stream of all tokens, which other CTAs may still be writing.
struct Residual {
  gpu::Tagged* words;  // [M, D / 2]
  uint32_t tag;

  // Waits for `count` quads (four values): first, first + step, ...
  template <int kMost>
  __device__ __forceinline__ void wait_quads(uint2 (&v)[kMost], int count, int first,
                                             int step) const {
    gpu::TaggedPair seen[kMost];
    gpu::wait_tagged(
        seen, count, [&](int i) { return words + (first + i * step) * 2; }, tag);
#pragma unroll
    for (int i = 0; i < kMost; ++i) v[i] = i < count ? gpu::values(seen[i]) : uint2{};
  }
  __device__ __forceinline__ gpu::Tagged load_pair(int at) const {
    return gpu::load_tagged(words + at);
  }
  __device__ __forceinline__ uint32_t wait_pair(gpu::Tagged seen, int at) const {
    return gpu::wait_tagged(seen, words + at, tag);
  }
};

inline constexpr int kMaxNeurons = 256;  // of a CTA

// max(0, value); NaN stays NaN.
__device__ __forceinline__ float relu(float value) { return value < 0.0f ? 0.0f : value; }

template <int kTokens>
struct HiddenShared {
  // The gate, then gate * up, of the CTA's neurons; 0 past them. Padded against bank conflicts.
  alignas(16) __nv_bfloat16 h[kTokens][kMaxNeurons + 8];
  alignas(16) uint8_t zeros[16];  // read in place of rows that do not exist
  uint16_t list[kMaxNeurons];     // active neurons, or those that may be
  float errors[kMaxNeurons];      // bounds of the screen
  int warp_counts[kMaxNeurons / 32];
};

// Where a CTA stores its part of y: tagged words for a single token, plain numbers for more tokens,
// behind which the grid has to synchronise.
template <int kTokens>
class Part {
 public:
  __device__ __forceinline__ Part(const DecodeLayers& p, uint32_t tag)
      : words_(p.workspace.tagged_parts + int64_t{blockIdx.x} * p.width),
        plain_(p.workspace.parts + int64_t{blockIdx.x} * p.tokens * p.width),
        tokens_(p.tokens),
        width_(p.width),
        tag_(tag) {}

  __device__ __forceinline__ void store(int token, int column, float value) const {
    if (token >= tokens_ || column >= width_) return;
    if constexpr (kTokens == 1) {
      gpu::store_tagged(words_ + column, __float_as_uint(value), tag_);
    } else {
      plain_[int64_t{token} * width_ + column] = value;
    }
  }
  // Columns `column` and the next.
  __device__ __forceinline__ void store2(int token, int column, float first, float second) const {
    if (token >= tokens_) return;
    if constexpr (kTokens == 1) {
      gpu::store_tagged(words_ + column, __float_as_uint(first), __float_as_uint(second), tag_);
    } else {
      *reinterpret_cast<float2*>(plain_ + int64_t{token} * width_ + column) =
          make_float2(first, second);
    }
  }

 private:
  gpu::Tagged* words_;
  float* plain_;
  int tokens_, width_;
  uint32_t tag_;
};

// The CTA's part of y = h w_down in a dense layer, with all its rows of w_down from the ring
// buffer. Warps split the columns; 16 columns are the 16-row operand, transposed by ldmatrix.
template <int kTokens, int kStages>
__device__ __forceinline__ void dense_down(const DecodeLayers& p, const Neurons& neurons,
                                           RowRing<kStages>& ring,
                                           const HiddenShared<kTokens>& hidden,
                                           const Part<kTokens>& part) {
  constexpr int kTile = 16, kTiles = kChunk / kTile / kWarps;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // The row of an 8 x 8 matrix whose address this lane gives. The four matrices are neurons 0-7,
  // 0-7, 8-15, 8-15 by columns 0-7, 8-15, 0-7, 8-15.
  const int row = lane / 16 * 8 + lane % 8, at = (warp * kTiles * kTile + lane / 8 % 2 * 8) * 2;
  const uint32_t zeros = gpu::smem_address(hidden.zeros);
#pragma unroll 1
  for (int column = 0; column < p.width; column += kChunk) {
    const int columns = min(kChunk, p.width - column);
    const uint32_t row_at = static_cast<uint32_t>(row * down_pitch(columns) + at);
    float acc[kTiles][4] = {};
#pragma unroll 1
    for (int base = 0; base < neurons.count; base += kGroup) {
      const uint32_t rows = ring.take();
      const bool exists = base + row < neurons.count;
      uint32_t h[2] = {};
      if (lane / 4 < kTokens) {
        const __nv_bfloat16* from = &hidden.h[lane / 4 % kTokens][base + lane % 4 * 2];
        h[0] = *reinterpret_cast<const uint32_t*>(from);
        h[1] = *reinterpret_cast<const uint32_t*>(from + 8);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int tile_at = tile * kTile;
        if (warp * kTiles * kTile + tile_at >= columns) break;
        // The last tile may reach past the end of the row; those columns are not stored.
        uint32_t w[4];
        gpu::load_matrices_transposed(
            w, exists ? rows + row_at + static_cast<uint32_t>(tile_at * 2) : zeros);
        gpu::mma_16x8x16(acc[tile], w[0], w[1], w[2], w[3], h[0], h[1]);
      }
      ring.release();
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane % 4 * 2 + i % 2;
        const int of_chunk = (warp * kTiles + tile) * kTile + lane / 4 + i / 2 * 8;
        if (token < kTokens && of_chunk < columns) {
          part.store(token, column + of_chunk, acc[tile][i]);
        }
      }
    }
  }
}

// The CTA's part of y in a sparse layer. Reads rows of w_up and w_down of active neurons only,
// directly from memory. With a screen, it reads the rows of all neurons that the screen let
// through, those of w_gate too.
template <int kTokens>
class FiredNeurons {
 public:
  // Lists the neurons whose h is not 0, and tells all CTAs whether this one will have a part.
  __device__ __forceinline__ FiredNeurons(const DecodeLayers& p, const DecodeLayer& layer,
                                          uint32_t tag, const Neurons& neurons,
                                          HiddenShared<kTokens>& hidden)
      : p_(p), layer_(layer), neurons_(neurons), hidden_(hidden) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    bool fires = false;
    if (thread < neurons.count) {
#pragma unroll
      for (int m = 0; m < kTokens; ++m) fires = fires || !(value(m, thread) == 0.0f);
    }
    const uint32_t ballot = __ballot_sync(~0u, fires);
    if (lane == 0 && warp < kMaxNeurons / 32) hidden_.warp_counts[warp] = __popc(ballot);
    sync_threads();
    int before = 0;
#pragma unroll
    for (int w = 0; w < kMaxNeurons / 32; ++w) {
      if (w < warp) before += hidden_.warp_counts[w];
      count_ += hidden_.warp_counts[w];
    }
    if (fires) {
      hidden_.list[before + __popc(ballot & ((1u << lane) - 1))] = static_cast<uint16_t>(thread);
    }
    if constexpr (kTokens == 1) {
      if (thread == 0) gpu::store_tagged(p.workspace.fired + blockIdx.x, count_ > 0, tag);
    }
    sync_threads();
  }

  // Adds the active neurons not yet counted (of those the screen let through) to nnz.
  __device__ __forceinline__ void up_down(Product<kTokens>& product, const Part<kTokens>& part,
                                          int& nnz) {
    if (kTokens == 1 && count_ == 0) return;  // no CTA waits for a part
    const int first_column = static_cast<int>(threadIdx.x) * 2;
    Columns w[kAtOnce];
    load(w, first_column, 0);  // issued before w_up's rows, to hide the latency
    if (kTokens == 1 && screened(p_, layer_)) {
      gate_up(product, nnz);
    } else if (count_ > 0 && layer_.w_gate != nullptr) {
      up(product);
    }
#pragma unroll 1
    for (int column = first_column; column < p_.width; column += kStep * kPairsOwn) {
      float2 y[kTokens][kPairsOwn] = {};
#pragma unroll 1
      for (int i = 0; i < count_; i += kAtOnce) {
        if (i > 0 || column != first_column) load(w, column, i);
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
          if (i + a < count_) add_row(y, w[a], hidden_.list[i + a]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPairsOwn; ++j) {
        if (column + j * kStep >= p_.width) break;
#pragma unroll
        for (int m = 0; m < kTokens; ++m) part.store2(m, column + j * kStep, y[m][j].x, y[m][j].y);
      }
    }
  }

 private:
  // A thread has pairs of columns kStep apart, so that a warp reads whole lines.
  static constexpr int kStep = kThreads * 2, kPairsOwn = 4;
  static constexpr int kAtOnce = 4;  // rows of w_down that a thread loads ahead
  struct Columns {
    uint32_t pair[kPairsOwn];
  };

  __device__ __forceinline__ float value(int token, int neuron) const {
    return __bfloat162float(hidden_.h[token][neuron]);
  }
  __device__ __forceinline__ void load(Columns (&w)[kAtOnce], int column, int first) const {
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      w[a] = Columns{};
      if (first + a >= count_) continue;
      const __nv_bfloat16* row =
          layer_.w_down + int64_t{neurons_.begin + hidden_.list[first + a]} * p_.width;
#pragma unroll
      for (int j = 0; j < kPairsOwn; ++j) {
        const int at = column + j * kStep;
        if (at < p_.width) w[a].pair[j] = __ldcs(reinterpret_cast<const uint32_t*>(row + at));
      }
    }
  }
  __device__ __forceinline__ void add_row(float2 (&y)[kTokens][kPairsOwn], const Columns& w,
                                          int neuron) const {
#pragma unroll
    for (int j = 0; j < kPairsOwn; ++j) {
      const float2 row = to_floats(w.pair[j]);
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        const float h = value(m, neuron);
        y[m][j].x = fmaf(h, row.x, y[m][j].x);
        y[m][j].y = fmaf(h, row.y, y[m][j].y);
      }
    }
  }

  // The i-th listed neuron's row, or null past the list.
  __device__ __forceinline__ const __nv_bfloat16* row(const __nv_bfloat16* weight, int i) const {
    if (i >= count_) return nullptr;
    return weight + int64_t{neurons_.begin + hidden_.list[i]} * p_.width;
  }

  // With a screen: h = relu(gate) * up of the listed neurons, or relu(up) without a gate. A group
  // is eight neurons' rows of w_gate and w_up, or 16 neurons' rows of w_up.
  __device__ __forceinline__ void gate_up(Product<kTokens>& product, int& nnz) {
    const bool gated = layer_.w_gate != nullptr;
    const int step = gated ? kPairs : kGroup;
    const auto store = [&](int i, int token, float gate, float up) {
      if (i >= count_) return;
      const __nv_bfloat16 g = __float2bfloat16(relu(gate));
      const bool fires = !(__bfloat162float(g) == 0.0f);
      nnz += fires;
      hidden_.h[token][hidden_.list[i]] =
          gated && fires ? __float2bfloat16(__bfloat162float(g) * up) : g;
    };
    product.loaded_groups((count_ + step - 1) / step, p_.width,
                          [&](int group, int pair) {
                            const int i = group * step + pair;
                            return gated ? Rows{row(layer_.w_gate, i), row(layer_.w_up, i)}
                                         : Rows{row(layer_.w_up, i), row(layer_.w_up, i + kPairs)};
                          },
                          [&](int group, int token, int pair, float low, float high) {
                            const int i = group * step + pair;
                            store(i, token, low, high);
                            if (!gated) store(i + kPairs, token, high, 0.0f);
                          });
    sync_threads();
  }

  // Without a screen, h holds the gate: h *= up.
  __device__ __forceinline__ void up(Product<kTokens>& product) {
    const auto multiply = [&](int i, int token, float up) {
      if (i >= count_) return;
      __nv_bfloat16& h = hidden_.h[token][hidden_.list[i]];
      const float gate = __bfloat162float(h);
      if (!(gate == 0.0f)) h = __float2bfloat16(gate * up);
    };
    product.loaded_groups((count_ + kGroup - 1) / kGroup, p_.width,
                          [&](int group, int pair) {
                            const int i = group * kGroup + pair;
                            return Rows{row(layer_.w_up, i), row(layer_.w_up, i + kPairs)};
                          },
                          [&](int group, int token, int pair, float low, float high) {
                            multiply(group * kGroup + pair, token, low);
                            multiply(group * kGroup + pair + kPairs, token, high);
                          });
    sync_threads();
  }

  const DecodeLayers& p_;
  const DecodeLayer& layer_;
  const Neurons& neurons_;
  HiddenShared<kTokens>& hidden_;
  int count_ = 0;
};

// Adds the active neurons that this thread counted, and the tokens, to the layer's activity.
__device__ __forceinline__ void count_fired(const DecodeLayers& p, const DecodeLayer& l, int nnz) {
  if (l.activity == nullptr) return;
  const int total = __reduce_add_sync(~0u, nnz);
  if (threadIdx.x % 32 != 0) return;
  if (total > 0) atomicAdd(&l.activity->nnz, static_cast<unsigned long long>(total));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&l.activity->tokens, static_cast<unsigned long long>(p.tokens));
  }
}

// --- x += the CTAs' parts of y ---
// A CTA adds a share of the columns. Teams of kAddPairs lanes take the parts of CTAs round-robin;
// then a warp's four teams are added, then the warps: one order for any number of tokens.
inline constexpr int kAddPairs = 8;  // lanes, each with two columns of a token

template <int kTokens>
struct AddShared {
  static constexpr int kAtOnce = kTokens == 1 ? 1 : 4;  // tokens at a time
  float2 sums[kWarps][kAtOnce * kAddPairs];
};

// The columns this CTA adds, in pairs.
struct AddShare {
  int begin, end;
  __device__ explicit AddShare(int width) {
    const auto first = [&](int64_t cta) { return static_cast<int>(cta * (width / 2) / gridDim.x); };
    begin = first(blockIdx.x);
    end = first(blockIdx.x + 1);
  }
};

// Waits until the `count` CTAs first, first + step, ... have said whether they have a part, and
// returns which of them do.
template <int kMost>
__device__ __forceinline__ void which_have_parts(bool (&has)[kMost], const DecodeLayers& p,
                                                 uint32_t tag, bool all, int first, int step,
                                                 int count) {
  if (all) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) has[i] = i < count;
    return;
  }
  gpu::Tagged seen[kMost];
  gpu::wait_all_tagged(
      seen, [&](int i) { return i < count; },
      [&](int i) { return gpu::load_tagged(p.workspace.fired + first + i * step); }, tag);
#pragma unroll
  for (int i = 0; i < kMost; ++i) has[i] = i < count && static_cast<uint32_t>(seen[i]) != 0;
}

// before: x before the FFN. Calls done(index of the pair in x, its two values) for each pair of
// columns. all: every CTA has a part; otherwise those that say so in workspace.fired (one token).
template <int kTokens, typename Done>
__device__ __forceinline__ void add_parts(const DecodeLayers& p, uint32_t tag, bool all,
                                          const AddShare& share, const Residual& before,
                                          AddShared<kTokens>& shared, const Done& done) {
  constexpr int kAtOnce = AddShared<kTokens>::kAtOnce, kTeams = kThreads / kAddPairs;
  constexpr int kParts = 5;  // loaded ahead
  const int thread = static_cast<int>(threadIdx.x), ctas = static_cast<int>(gridDim.x);
  const int team = thread / kAddPairs, lane = thread % kAddPairs, pairs = p.width / 2;
  for (int base = share.begin; base < share.end; base += kAddPairs) {
    const int pair = base + lane;
    const bool inside = pair < share.end;
    for (int token = 0; token < p.tokens; token += kAtOnce) {
      const int finished = token + team;  // the token whose sum this thread stores
      const bool finishes = inside && team < kAtOnce && finished < p.tokens;
      const int at = finished * pairs + pair;
      gpu::Tagged x{};
      if (finishes) x = before.load_pair(at);
      float2 sums[kAtOnce] = {};
      for (int first = team; first < ctas; first += kTeams * kParts) {
        if constexpr (kTokens == 1) {
          const gpu::Tagged* words = p.workspace.tagged_parts + pair * 2;
          gpu::TaggedPair seen[kParts];
          const int count = inside ? min((ctas - first - 1) / kTeams + 1, kParts) : 0;
          bool has[kParts];
          which_have_parts(has, p, tag, all, first, kTeams, count);
          gpu::wait_all_tagged(
              seen, [&](int i) { return has[i]; },
              [&](int i) { return gpu::load_tagged_pair(words + (first + i * kTeams) * p.width); },
              tag);
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            if (!has[i]) continue;
            const uint2 v = gpu::values(seen[i]);
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

// --- All layers ---

// The warp that reads is in a warpgroup of its own, whose registers go to the warps that multiply:
// a spilled register that is read back would wait behind the weights.
constexpr int kAllThreads = kThreads + 128;
constexpr int kMultiplyRegisters = 232, kReadRegisters = 40;

constexpr int kMaxWidth = 16384;
constexpr int kMaxQkvGroups = 32;  // of a CTA
// A stage has 32 KiB in layers of 1,024 columns and more.
template <int kTokens>
constexpr int kStagesFor = kTokens == 1 ? 6 : 4;

// Bytes between the rows of a stage.
__host__ __device__ int stage_pitch(int width, int q_width) {
  const int most = width > q_width ? width : q_width;
  return row_pitch(most < kChunk ? most : kChunk);
}

// The low row of a pair of the output projection; the high one is the next.
__device__ __forceinline__ int output_column(int group, int pair) {
  return group * kGroup + pair * 2;
}

// The low row of a pair of q/k/v rows, which are rotated together; the high one is hd / 2 further.
__device__ __forceinline__ int qkv_column(const DecodeLayers& p, int group, int pair) {
  const int of_head = p.head_dim / kGroup;
  return group / of_head * p.head_dim + group % of_head * kPairs + pair;
}

// --- The order in which a CTA reads its weights ---
// Ring buffer stages, as the warps that multiply take them:
//   products  groups of 16 rows, kChunk columns after kChunk columns
//   screen    rows of 16 neurons, a piece of kScreenPiece columns and its scales after another
//   down      rows of 16 neurons: all neurons of the CTA for kChunk columns, then for the next
template <int kStages>
class WeightReader {
 public:
  __device__ __forceinline__ explicit WeightReader(RowRing<kStages>& ring) : ring_(ring) {}

  // Reads all layers; run by one warp. before(layer) is called before a layer's first weights.
  // kScreens: layers may have screens.
  template <bool kScreens, typename Before>
  __device__ __forceinline__ void read_all(const DecodeLayers& p, const Before& before) {
    const Neurons neurons(p.ffn);
#pragma unroll 1
    for (int l = 0; l < p.layers; ++l) {
      before(l);
      ring_.limit_requests(most_requests(p.layer[l]));
#pragma unroll 1
      for (int step = 0; step < 3; ++step) {
        if (kScreens && step == 2 && screened(p, p.layer[l])) {
          read_screen(p, p.layer[l].screen, neurons);
        } else {
          read_product(p, p.layer[l], step, neurons);
        }
      }
      if (!p.layer[l].sparse) read_down(p, p.layer[l], neurons);
    }
  }

 private:
  // Stages requested and not yet there, at most. Two of every CTA are already twice what memory
  // delivers during one access; with more, the words that CTAs exchange would wait behind weights.
  // A sparse layer reads fewer bytes than its steps take time, so that one is enough.
  __device__ __forceinline__ static int most_requests(const DecodeLayer& layer) {
    return layer.sparse ? 1 : 2;
  }

  // The rows of q/k/v (step 0), of the output projection (1), of the FFN's first weights (2).
  __device__ __forceinline__ void read_product(const DecodeLayers& p, const DecodeLayer& layer,
                                               int step, const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32, pair = lane % kPairs;
    const int high = lane / kPairs % 2, q_width = p.heads * p.head_dim;
    const bool both = paired(layer);
    const __nv_bfloat16* w = step == 0                                        ? layer.w_qkv
                             : step == 1                                      ? layer.w_o
                             : layer.w_gate == nullptr || (both && high == 1) ? layer.w_up
                                                                              : layer.w_gate;
    const int width = step == 1 ? q_width : p.width;
    const int rows = step == 0 ? q_width + 2 * p.kv_heads * p.head_dim : p.width;
    const int groups = step == 2 ? (neurons.count + ffn_step(layer) - 1) / ffn_step(layer)
                                 : (rows + kGroup - 1) / kGroup;
    const int first = step == 2 ? 0 : static_cast<int>(blockIdx.x);
    const int stride = step == 2 ? 1 : static_cast<int>(gridDim.x);
#pragma unroll 1
    for (int group = first; group < groups; group += stride) {
      int row;
      bool exists = lane < kGroup;
      if (step == 0) {
        row = qkv_column(p, group, pair) + high * (p.head_dim / 2);
      } else if (step == 1) {
        row = output_column(group, pair) + high;
        exists = exists && row < p.width;
      } else {
        const int neuron = group * ffn_step(layer) + (both ? pair : lane);
        row = neurons.begin + neuron;
        exists = exists && neuron < neurons.count;
      }
#pragma unroll 1
      for (int column = 0; column < width; column += kChunk) {
        ring_.fill(w + int64_t{row} * width + column, exists, min(kChunk, width - column) * 2,
                   ring_.pitch());
      }
    }
  }

  __device__ __forceinline__ void read_screen(const DecodeLayers& p, const GateScreen& screen,
                                              const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t row_bytes = screen_row_bytes(p.width);
#pragma unroll 1
    for (int base = 0; base < neurons.count; base += kGroup) {
      const uint8_t* from = screen.rows + (neurons.begin + base + lane) * row_bytes;
#pragma unroll 1
      for (int column = 0; column < p.width; column += kScreenPiece) {
        const auto bytes =
            static_cast<int>(screen_piece_bytes(min(kScreenPiece, p.width - column)));
        ring_.fill(from, lane < kGroup && base + lane < neurons.count, bytes, ring_.pitch());
        from += bytes;
      }
    }
  }

  __device__ __forceinline__ void read_down(const DecodeLayers& p, const DecodeLayer& layer,
                                            const Neurons& neurons) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int column = 0; column < p.width; column += kChunk) {
      const int columns = min(kChunk, p.width - column);
#pragma unroll 1
      for (int base = 0; base < neurons.count; base += kGroup) {
        const int neuron = base + lane;
        ring_.fill(layer.w_down + int64_t{neurons.begin + neuron} * p.width + column,
                   lane < kGroup && neuron < neurons.count, columns * 2, down_pitch(columns));
      }
    }
  }

  RowRing<kStages>& ring_;
};

// --- Inputs of products ---
// Zeroed at the start.
template <int kTokens>
struct NormShared {
  alignas(16) float squares[kTokens][kMaxWidth / 128];  // sums of 32 quads each
};

__device__ __forceinline__ float sum_of_squares(const uint2& x) {
  const float2 a = to_floats(x.x), b = to_floats(x.y);
  return fmaf(a.x, a.x, a.y * a.y) + fmaf(b.x, b.x, b.y * b.y);
}

// Stores rms_norm(x), rounded to bf16 and padded with zeros to a whole block, in x_shared and, with
// for_screen, in `screen`. Squares are added in one order for any number of tokens: a warp's 32
// quads (four values), then these sums. All threads that multiply call it.
template <int kTokens>
__device__ __forceinline__ void stage_normed(const DecodeLayers& p, const Residual& x,
                                             const __nv_bfloat16* weight,
                                             NormShared<kTokens>& shared, uint8_t* x_shared,
                                             int pitch, const ScreenX& screen, bool for_screen) {
  constexpr int kTeam = kThreads / kTokens;      // threads per token
  constexpr int kAtOnce = kTokens == 1 ? 2 : 8;  // quads that a thread loads ahead
  const int thread = static_cast<int>(threadIdx.x), token = thread / kTeam;
  const int quads = p.width / 4, padded = (quads + 7) / 8 * 8;
  const auto* norm = reinterpret_cast<const uint2*>(weight);
  auto* row = reinterpret_cast<uint2*>(x_shared + token * pitch);
  const bool mine = token < p.tokens;
  uint2 scale[kAtOnce];  // norm weights of the first quads
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = thread % kTeam + i * kTeam;
    scale[i] = mine && at < quads ? __ldg(norm + at) : uint2{};
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

// --- A barrier of all CTAs ---
// What any thread wrote to global memory before wait() can be read by every thread after it, with
// loads that bypass the L1. The threads that multiply call wait() equally often in all CTAs, and
// leave() at the end. counters: two in device memory, 0 between kernels.
class GridBarrier {
 public:
  __device__ explicit GridBarrier(uint32_t* counters) : arrived_(counters), left_(counters + 1) {}

  __device__ __forceinline__ void wait() {
    sync_threads();
    if (threadIdx.x == 0) {
      expected_ += gridDim.x;
      gpu::add_release(arrived_, 1u);
      while (gpu::load_acquire(arrived_) < expected_) {
      }
    }
    sync_threads();
  }

  // The last CTA resets the counters for the next kernel; returns true in one thread of it.
  __device__ __forceinline__ bool leave() {
    if (threadIdx.x != 0 || atomicAdd(left_, 1u) != gridDim.x - 1) return false;
    *arrived_ = 0;
    *left_ = 0;
    return true;
  }

 private:
  uint32_t *arrived_, *left_;
  uint32_t expected_ = 0;
};

// --- The layers ---
// A group of q/k/v rows.
struct QkvGroup {
  int head;   // of all H + 2 H_kv
  int first;  // low row of its first pair, within the head
};

// Adds the bias, rotates queries and keys, writes the pair to qkv, and keys and values to the
// cache.
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
  gpu::store_tagged(p.workspace.qkv + (token * heads + head) * half + i, bits, tag);
  if (head < p.heads) return;
  const bool key = head < p.heads + p.kv_heads;
  const int kv_head = head - p.heads - (key ? 0 : p.kv_heads);
  auto* row = reinterpret_cast<unsigned short*>(
      (key ? l.keys : l.values) + (batch.cache_rows[token] * p.kv_heads + kv_head) * p.head_dim);
  row[i] = static_cast<unsigned short>(bits & 0xffff);
  row[i + half] = static_cast<unsigned short>(bits >> 16);
}

template <int kTokens, int kColumns>
class Layers {
 public:
  static constexpr int kStages = kStagesFor<kTokens>;
  struct Shared {
    typename RowRing<kStages>::Shared ring;
    BatchShared batch;
    QkvGroup qkv[kMaxQkvGroups];
    HiddenShared<kTokens> hidden;
    NormShared<kTokens> norm;
    union {
      typename Product<kTokens>::Shared product;
      AttendShared<kColumns> attend;
      AddShared<kTokens> add;
    };
  };
  __host__ __device__ static int pitch(int width, int q_width) {
    return row_pitch(width > q_width ? width : q_width);
  }
  __host__ __device__ static int ring_bytes(int width, int q_width) {
    return kStages * kGroup * stage_pitch(width, q_width);
  }
  static int64_t shared_bytes(int width, int q_width, int tokens, bool screens) {
    const int screen = screens ? ScreenX::bytes(width) : 0;
    return ring_bytes(width, q_width) + int64_t{tokens} * pitch(width, q_width) + screen;
  }

  __device__ __forceinline__ Layers(const DecodeLayers& p, Shared& shared, uint8_t* memory)
      : p_(p),
        s_(shared),
        x_(memory + ring_bytes(p.width, p.heads * p.head_dim)),
        pitch_(pitch(p.width, p.heads * p.head_dim)),
        neurons_(p.ffn),
        add_share_(p.width),
        qkv_groups_(own_groups((p.heads + 2 * p.kv_heads) * p.head_dim / kGroup)),
        output_groups_(own_groups((p.width + kGroup - 1) / kGroup)),
        ring_(shared.ring, gpu::smem_address(memory), stage_pitch(p.width, p.heads * p.head_dim)),
        product_(p.tokens, shared.product, gpu::smem_address(x_), pitch_),
        screen_(x_ + p.tokens * pitch_, p.width),
        barrier_(p.workspace.state + 1) {}

  // All threads of the CTA call this.
  __device__ __forceinline__ void run(uint8_t* memory) {
    RowRing<kStages>::init(s_.ring);
    // The last block of a row may be short. What lies behind it is multiplied by zeros, so that it
    // must not be NaN or infinity.
    const int pieces = ring_bytes(p_.width, p_.heads * p_.head_dim) / 16;
    if (p_.width % kBlock != 0 || p_.heads * p_.head_dim % kBlock != 0) {
      for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) {
        reinterpret_cast<uint4*>(memory)[i] = uint4{};
      }
      gpu::fence_async_shared();
    }
    load_batch();
    __syncthreads();
    s_.batch.find_items(p_);
    __syncthreads();
    if (threadIdx.x < kThreads) {
      gpu::registers_increase<kMultiplyRegisters>();
      multiply();
    } else {
      gpu::registers_decrease<kReadRegisters>();
      if (threadIdx.x < kThreads + 32) {
        WeightReader<kStages>(ring_).template read_all<kTokens == 1>(
            p_, [&](int layer) { prefetch_for(layer); });
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply() {
    const uint32_t done = *p_.workspace.state;  // tags used by all calls before
    publish(done + 1);
#pragma unroll 1
    for (int layer = 0; layer < p_.layers; ++layer) {
      const DecodeLayer& l = p_.layer[layer];
      tag_ = done + 2 + static_cast<uint32_t>(layer);
      int nnz = 0;
#pragma unroll 1
      for (int step = 0; step < 3; ++step) product(l, step, nnz);
      const Part<kTokens> part(p_, tag_);
      if (l.sparse) {
        FiredNeurons<kTokens>(p_, l, tag_, neurons_, s_.hidden).up_down(product_, part, nnz);
      } else {
        dense_down<kTokens>(p_, neurons_, ring_, s_.hidden, part);
      }
      count_fired(p_, l, nnz);
      if constexpr (kTokens > 1) barrier_.wait();
      add_parts<kTokens>(p_, tag_, !l.sparse, add_share_, residual(0, tag_), s_.add,
                         [&](int at, uint32_t bits) {
                           if (layer + 1 < p_.layers) {
                             gpu::store_tagged(residual(1, tag_).words + at, bits, tag_);
                           } else {
                             reinterpret_cast<uint32_t*>(p_.x)[at] = bits;
                           }
                         });
    }
    if (barrier_.leave()) *p_.workspace.state = done + 1 + static_cast<uint32_t>(p_.layers);
  }

  // Writes the kernel's input as tagged words, for which the first layer waits as any other does.
  __device__ __forceinline__ void publish(uint32_t tag) const {
    const int pairs = p_.width / 2, share = add_share_.end - add_share_.begin;
    for (int i = static_cast<int>(threadIdx.x); i < p_.tokens * share; i += kThreads) {
      const int at = i / share * pairs + add_share_.begin + i % share;
      gpu::store_tagged(residual(1, tag).words + at, reinterpret_cast<const uint32_t*>(p_.x)[at],
                        tag);
    }
  }

  // A step: brings its input into shared memory, multiplies this CTA's groups of rows and uses the
  // sums. Step 0 is q/k/v and then this CTA's share of the attention, 1 the output projection, 2
  // the gate. The three share one piece of code, because code that runs once a layer also waits for
  // its instructions to be fetched.
  __device__ __forceinline__ void product(const DecodeLayer& l, int step, int& nnz) {
    const int groups = step == 0   ? qkv_groups_
                       : step == 1 ? output_groups_
                                   : (neurons_.count + ffn_step(l) - 1) / ffn_step(l);
    const bool screens = kTokens == 1 && step == 2 && screened(p_, l);
    const int own_neuron = static_cast<int>(threadIdx.x);
    float error = 0.0f;
    if (screens && own_neuron < neurons_.count) {
      error = __ldg(l.screen.errors + neurons_.begin + own_neuron);
    }
    const int width = step == 1 ? p_.heads * p_.head_dim : p_.width;
    const Residual x = step == 2 ? residual(0, tag_) : residual(1, tag_ - 1);
    if (step == 1) {
      if (groups > 0) stage_attended<kTokens>(p_, tag_, x_, pitch_);
    } else if (groups > 0 || step == 2) {
      stage_normed<kTokens>(p_, x, step == 0 ? l.attention_norm : l.ffn_norm, s_.norm, x_, pitch_,
                            screen_, screens);
    }
    if constexpr (kTokens == 1) {
      if (screens) {
        // kMaxNeurons threads store; the product synchronises before it reads.
        s_.hidden.errors[own_neuron] = error;
        product_.screen_groups(groups, ring_, width, screen_,
                               [&](int group, int, int pair, float low, float high) {
                                 finish_screen(group, pair, low, high);
                               });
        sync_threads();
        return;
      }
    }
    // The residual of the first batch of groups, issued early to hide the load's latency.
    const auto own = product_.finisher();
    gpu::Tagged before{};
    if (step == 1 && own.finishes && own.group < groups &&
        output_column(group_of(own.group), own.pair) < p_.width) {
      before = x.load_pair(output_place(own.group, own.token, own.pair));
    }
    product_.groups(groups, ring_, width,
                    [&](int group, int token, int pair, float low, float high) {
                      if (step == 0) {
                        finish_qkv(p_, l, tag_, s_.batch, s_.qkv[group], token, pair, low, high);
                      } else if (step == 1) {
                        finish_output(x, before, group, token, pair, low, high);
                      } else {
                        finish_gate(l, group, token, pair, low, high, nnz);
                      }
                    });
    if (step == 0) {
      Attention<kColumns>(p_, l, tag_, s_.batch, s_.attend).run();
    } else if (step == 2) {
      sync_threads();
    }
  }

  // Groups this CTA owns, assigned round-robin.
  __device__ __forceinline__ static int own_groups(int groups) {
    const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    return groups > cta ? (groups - cta - 1) / ctas + 1 : 0;
  }
  __device__ __forceinline__ static int group_of(int own) {
    return static_cast<int>(blockIdx.x) + own * static_cast<int>(gridDim.x);
  }
  // x after a layer's attention (0), after its FFN (1).
  __device__ __forceinline__ Residual residual(int which, uint32_t tag) const {
    return {p_.workspace.x + which * p_.tokens * (p_.width / 2), tag};
  }

  // Prefetches what the layer reads beside its matrices into the L2 cache; by the reading warp.
  __device__ __forceinline__ void prefetch_for(int layer) const {
    const DecodeLayer& l = p_.layer[layer];
    const auto norm = [&](const __nv_bfloat16* weight) {
      gpu::bulk_prefetch(weight, static_cast<uint32_t>(p_.width) * 2);
    };
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kThreads) {
      norm(l.attention_norm);
      norm(l.ffn_norm);
    }
    if (kTokens == 1 && screened(p_, l)) {
      constexpr int kSector = 8;
      const int neuron = static_cast<int>(threadIdx.x) % 32 * kSector;
      if (neuron < neurons_.count) {
        gpu::prefetch_around(l.screen.errors + neurons_.begin + neuron);
      }
    }
    prefetch(p_, l, s_.batch);
  }

  __device__ __forceinline__ void load_batch() {
    s_.batch.load(p_);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < qkv_groups_) {
      const int column = qkv_column(p_, group_of(thread), 0);
      s_.qkv[thread] = {column / p_.head_dim, column % p_.head_dim};
    }
    clear(s_.hidden);
    clear(s_.norm);
  }
  template <typename T>
  __device__ __forceinline__ static void clear(T& shared) {
    static_assert(sizeof(T) % 16 == 0);
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(T) / 16);
         i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint4*>(&shared)[i] = uint4{};
    }
  }

  __device__ __forceinline__ int output_place(int group, int token, int pair) const {
    return token * (p_.width / 2) + output_column(group_of(group), pair) / 2;
  }
  // before: the residual as loaded early, for the first batch of groups.
  __device__ __forceinline__ void finish_output(const Residual& x, gpu::Tagged before, int group,
                                                int token, int pair, float low, float high) const {
    if (output_column(group_of(group), pair) >= p_.width) return;
    const int at = output_place(group, token, pair);
    const bool first = group < Product<kTokens>::kBatch;
    const float2 was = to_floats(x.wait_pair(first ? before : x.load_pair(at), at));
    gpu::store_tagged(residual(0, tag_).words + at, bf16x2(was.x + low, was.y + high), tag_);
  }

  __device__ __forceinline__ void finish_gate(const DecodeLayer& l, int group, int token, int pair,
                                              float low, float high, int& nnz) {
    const bool both = paired(l);
    const auto store = [&](int neuron, float gate, float up) {
      if (neuron >= neurons_.count) return;
      const __nv_bfloat16 g = __float2bfloat16(relu(gate));
      const bool fires = !(__bfloat162float(g) == 0.0f);
      s_.hidden.h[token][neuron] = both && fires ? __float2bfloat16(__bfloat162float(g) * up) : g;
      nnz += fires;
    };
    store(group * ffn_step(l) + pair, low, high);
    if (!both) store(group * ffn_step(l) + pair + kPairs, high, 0.0f);
  }

  // Stores 1 in h for neurons that may fire, 0 for those that do not.
  __device__ __forceinline__ void finish_screen(int group, int pair, float low, float high) {
    const auto store = [&](int neuron, float product) {
      if (neuron >= neurons_.count) return;
      const bool may_fire = !(product < -s_.hidden.errors[neuron]);
      s_.hidden.h[0][neuron] = __float2bfloat16(may_fire ? 1.0f : 0.0f);
    };
    store(group * kGroup + pair, low);
    store(group * kGroup + pair + kPairs, high);
  }

  const DecodeLayers& p_;
  Shared& s_;
  uint8_t* x_;
  const int pitch_;
  const Neurons neurons_;
  const AddShare add_share_;
  const int qkv_groups_, output_groups_;  // of this CTA
  RowRing<kStages> ring_;
  Product<kTokens> product_;
  ScreenX screen_;
  GridBarrier barrier_;
  uint32_t tag_ = 0;
};

template <int kTokens, int kColumns>
__global__ void __launch_bounds__(kAllThreads, 1)
    decode_layers_sm90_kernel(const __grid_constant__ DecodeLayers problem) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ typename Layers<kTokens, kColumns>::Shared shared;
  Layers<kTokens, kColumns>(problem, shared, memory).run(memory);
}

template <int kTokens>
int64_t shared_bytes(int64_t width, int64_t q_width, int64_t tokens, bool screens) {
  using Most = Layers<kTokens, 128>;
  return Most::shared_bytes(static_cast<int>(width), static_cast<int>(q_width),
                            static_cast<int>(tokens), screens) +
         static_cast<int64_t>(sizeof(typename Most::Shared));
}

bool has_screens(const DecodeLayers& problem) {
  return problem.tokens == 1 &&
         std::any_of(problem.layer, problem.layer + problem.layers,
                     [](const DecodeLayer& l) { return l.sparse && l.screen.rows != nullptr; });
}

template <int kTokens, int kColumns>
cudaError_t launch(const DecodeLayers& problem, int multiprocessors, cudaStream_t stream) {
  const auto kernel = decode_layers_sm90_kernel<kTokens, kColumns>;
  const auto shared = static_cast<int>(Layers<kTokens, kColumns>::shared_bytes(
      problem.width, problem.heads * problem.head_dim, problem.tokens, has_screens(problem)));
  const cudaError_t status = gpu::allow_most_shared_memory(kernel);
  if (status != cudaSuccess) return status;
  void* arguments[] = {const_cast<DecodeLayers*>(&problem)};
  return cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(multiprocessors)),
                                     dim3(kAllThreads), arguments, static_cast<size_t>(shared),
                                     stream);
}

template <int kTokens>
cudaError_t launch(const DecodeLayers& problem, int multiprocessors, cudaStream_t stream) {
  if (problem.head_dim <= 64) return launch<kTokens, 64>(problem, multiprocessors, stream);
  return launch<kTokens, 128>(problem, multiprocessors, stream);
}

DecodeWorkspace carve(const DecodeWorkspaceShape& s, Carver& carver) {
  DecodeWorkspace w;
  if (s.tokens == 0) return w;
  const int64_t heads = s.tokens * s.heads;
  const HeadParts parts(static_cast<int>(s.heads), static_cast<int>(s.kv_heads),
                        static_cast<int>(s.head_dim));
  const int64_t segments = parts.most_segments(s.max_length, static_cast<int>(s.multiprocessors));
  w.x = carver.take<uint64_t>(s.tokens * s.width);
  w.qkv = carver.take<uint64_t>(s.tokens * (s.heads + 2 * s.kv_heads) * s.head_dim / 2);
  w.attended = carver.take<uint64_t>(heads * s.head_dim / 2);
  w.segment_values = carver.take<uint64_t>(heads * segments * s.head_dim);
  w.segment_sums = carver.take<uint64_t>(heads * segments * 2);
  w.segments = static_cast<int>(segments);
  w.fired = carver.take<uint64_t>(s.multiprocessors);
  w.tagged_parts = carver.take<uint64_t>(s.multiprocessors * s.width);
  w.parts = carver.take<float>(s.multiprocessors * s.tokens * s.width);
  w.state = carver.take<uint32_t>(3);
  return w;
}

// The current device; zeros where it cannot run the kernel.
struct Device {
  int shared_bytes = 0, multiprocessors = 0;

  Device() {
    int major = 0;
    if (gpu::device_attribute(major, cudaDevAttrComputeCapabilityMajor) != cudaSuccess ||
        major != 9 ||
        gpu::device_attribute(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin) !=
            cudaSuccess ||
        gpu::device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount) != cudaSuccess) {
      shared_bytes = multiprocessors = 0;
    }
  }
};

struct Shape {
  int64_t width, q_width, ffn, head_dim;

  // Whether the shape fits, apart from shared memory.
  bool suits(const Device& device) const {
    // Arrays in shared memory hold a CTA's neurons, q/k/v groups and items of attention. q, k and v
    // have at most 3 H heads.
    return width % 8 == 0 && width <= kMaxWidth && head_dim % kGroup == 0 && head_dim <= 128 &&
           ffn <= int64_t{kMaxNeurons} * device.multiprocessors &&
           q_width <= head_dim * device.multiprocessors &&
           3 * q_width <= int64_t{kMaxQkvGroups} * kGroup * device.multiprocessors;
  }
  // Whether the shared memory of the kernel for kTokens fits.
  template <int kTokens>
  bool fits(const Device& device, int64_t tokens, bool screens) const {
    return shared_bytes<kTokens>(width, q_width, tokens, screens) <= device.shared_bytes;
  }
  int64_t max_tokens(const Device& device) const {
    if (!suits(device)) return 0;
    for (int64_t tokens = kMaxDecodeTokens; tokens > 1; --tokens) {
      if (fits<8>(device, tokens, false)) return tokens;
    }
    return fits<1>(device, 1, false) ? 1 : 0;
  }
  bool takes_screens(const Device& device) const {
    return suits(device) && screens_width(width) && fits<1>(device, 1, true);
  }
};

}  // namespace
}  // namespace decode

int64_t decode_workspace_bytes(const DecodeWorkspaceShape& shape) {
  Carver carver(nullptr, 256);
  decode::carve(shape, carver);
  return carver.bytes();
}

DecodeWorkspace decode_workspace(const DecodeWorkspaceShape& shape, void* memory) {
  Carver carver(memory, 256);
  return decode::carve(shape, carver);
}

int64_t decode_layers_max_tokens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim) {
  return decode::Shape{width, q_width, ffn, head_dim}.max_tokens(decode::Device());
}

bool decode_layers_take_screens(int64_t width, int64_t q_width, int64_t ffn, int64_t head_dim) {
  return decode::Shape{width, q_width, ffn, head_dim}.takes_screens(decode::Device());
}

cudaError_t launch_decode_layers_sm90(const DecodeLayers& problem, cudaStream_t stream) {
  if (problem.layers < 1 || problem.layers > kMaxDecodeLayers) return cudaErrorInvalidValue;
  const decode::Device device;
  const decode::Shape shape{problem.width, int64_t{problem.heads} * problem.head_dim, problem.ffn,
                            problem.head_dim};
  const bool screens = decode::has_screens(problem);
  if (problem.tokens < 1 || problem.tokens > shape.max_tokens(device) ||
      (screens && !shape.takes_screens(device))) {
    return cudaErrorInvalidValue;
  }
  // The kernel for one token has a deeper ring buffer, for which very wide models leave no room.
  return problem.tokens == 1 && shape.fits<1>(device, 1, screens)
             ? decode::launch<1>(problem, device.multiprocessors, stream)
             : decode::launch<8>(problem, device.multiprocessors, stream);
}

}  // namespace twell
