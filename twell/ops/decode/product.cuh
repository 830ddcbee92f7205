// SPDX-License-Identifier: Apache-2.0
// Products of 16 rows of a weight at a time, eight pairs of a "low" and a "high" one, with up to 8
// tokens in shared memory, on mma.sync with the weights as the 16-row operand. A CTA's warps cut
// the width; their partial sums are added in a fixed order, those of several groups at a time: what
// happens between two groups, one warp does alone, and all wait for it. What is low and high is the
// finish's choice, which gets both sums of a pair together.
//
// A product's sum does not depend on the order of its terms, so the eight values of a piece stand
// for whichever k the instruction thinks they are, the same ones in both operands: its words 0 and
// 2 are one instruction's, 1 and 3 another's. Of one token, both are one instruction's, which has
// columns to spare: its rows 0-7 and 8-15 are words 0, 2 and 1, 3 of the same eight rows, as they
// come from shared memory, and x's are two columns. The sums are the same for any number of tokens.
#pragma once

#include "twell/ops/decode/screen_x.cuh"
#include "twell/ops/decode/weight_stream.cuh"

namespace twell::decode {

struct Rows {
  const __nv_bfloat16 *low, *high;  // null: zeros
};

// This warp's blocks of a chunk of columns.
struct Blocks {
  int begin, end;
  __device__ explicit Blocks(int columns) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int blocks = (columns + kBlock - 1) / kBlock, share = (blocks + kWarps - 1) / kWarps;
    begin = min(warp * share, blocks);
    end = min(begin + share, blocks);
  }
};

// kTokens: at least the tokens.
template <int kTokens>
class Product {
 public:
  static constexpr int kBatch = kWarps / kTokens;  // groups that are finished together
  struct Shared {
    float partial[kBatch][kWarps][kGroup][kTokens + (kTokens > 1)];  // padded for the banks
  };

  // x: rows of tokens in shared memory, `pitch` bytes apart, zeros up to a whole block.
  __device__ __forceinline__ Product(int tokens, Shared& shared, uint32_t x, int pitch)
      : shared_(shared), tokens_(tokens) {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4;
    x_ = x + static_cast<uint32_t>(lane % 4 * 16);
    if (kTokens == 1) {
      x_ += static_cast<uint32_t>(column % 2 * 4);  // columns 2 to 7 are not looked at
    } else {
      x_ = column < tokens ? x_ + static_cast<uint32_t>(column * pitch) : 0;
    }
    row_ = lane / 4;
    at_ = lane % 4 * 16;
  }

  // What this thread finishes in a batch of groups, if it is one of those that do.
  struct Finisher {
    bool finishes;
    int group, token, pair;  // the group in the batch
  };
  __device__ __forceinline__ Finisher finisher() const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int token = warp % kTokens;
    return {lane % kTeam == 0 && token < tokens_, warp / kTokens, token, lane / kTeam};
  }

  // With the stream's next groups of rows: finish(group, token, pair, low, high), by one thread
  // each. Every thread that multiplies calls it. The CTA has to meet between two calls.
  template <int kStages, typename Finish>
  __device__ __forceinline__ void groups(int count, WeightStream<kStages>& stream, int width,
                                         const Finish& finish) {
    in_batches(
        count, [&](int) { return stream_group(stream, width); }, finish);
  }

  // With the screen's next groups of rows, one token: finish(group, 0, pair, low, high), the
  // products with x as it is staged in `x`.
  template <int kStages, typename Finish>
  __device__ __forceinline__ void screen_groups(int count, WeightStream<kStages>& stream, int width,
                                                const ScreenX& x, const Finish& finish) {
    in_batches(
        count, [&](int) { return screen_group(stream, width, x); }, finish);
  }

  // With any rows, past the stream: rows(group, this lane's pair), finish as above.
  template <typename RowsOf, typename Finish>
  __device__ __forceinline__ void extra_groups(int count, int width, const RowsOf& rows,
                                               const Finish& finish) {
    in_batches(
        count, [&](int group) { return extra_group(width, rows(group, row_)); }, finish);
  }

 private:
  static constexpr int kTeam = 4;  // lanes that add up a pair's partial sums
  // Of low and high rows (one token: rows 0-7 by column 0 and 8-15 by column 1 are wanted), or of
  // words 0, 2 and 1, 3 of 16 rows.
  struct Sums {
    float part[2][4] = {};
  };

  __device__ __forceinline__ void multiply(Sums& sums, const uint4& low, const uint4& high,
                                           const uint4& x) const {
    if constexpr (kTokens == 1) {
      sm90::mma_16x8x16(sums.part[0], low.x, low.y, low.z, low.w, x.x, x.z);
      sm90::mma_16x8x16(sums.part[1], high.x, high.y, high.z, high.w, x.x, x.z);
    } else {
      sm90::mma_16x8x16(sums.part[0], low.x, high.x, low.z, high.z, x.x, x.z);
      sm90::mma_16x8x16(sums.part[1], low.y, high.y, low.w, high.w, x.y, x.w);
    }
  }
  // A piece of x; one token: of its words the two that this lane's column has.
  __device__ __forceinline__ uint4 load_x(uint32_t offset) const {
    if constexpr (kTokens == 1) {
      return {sm90::load_shared4(x_ + offset), 0, sm90::load_shared4(x_ + offset + 8), 0};
    }
    return x_ != 0 ? sm90::load_shared16(x_ + offset) : uint4{};
  }

  template <typename SumsOf, typename Finish>
  __device__ __forceinline__ void in_batches(int count, const SumsOf& sums_of,
                                             const Finish& finish) {
#pragma unroll 1
    for (int base = 0; base < count; base += kBatch) {
      const int batch = min(kBatch, count - base);
#pragma unroll 1
      for (int i = 0; i < batch; ++i) store_partial(i, sums_of(base + i));
      finish_batch(batch, [&](int i, int token, int pair, float low, float high) {
        finish(base + i, token, pair, low, high);
      });
      if (base + kBatch < count) sync_threads();
    }
  }

  template <int kStages>
  __device__ __forceinline__ Sums stream_group(WeightStream<kStages>& stream, int width) const {
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kChunk) {
      const int columns = min(kChunk, width - column);
      const uint32_t low = stream.take() + static_cast<uint32_t>(row_ * stream.pitch() + at_);
      const uint32_t high = low + static_cast<uint32_t>(kPairs * stream.pitch());
      const auto x = static_cast<uint32_t>(column) * 2;
      // For several tokens both at once need more registers than there are.
      if (kTokens == 1 && columns == kChunk) {
        stream_chunk<true>(sums, low, high, x, columns);
      } else {
        stream_chunk<false>(sums, low, high, x, columns);
      }
      stream.release();
    }
    return sums;
  }
  // This warp's blocks of a chunk, which is a whole one or not.
  template <bool kWhole>
  __device__ __forceinline__ void stream_chunk(Sums& sums, uint32_t low, uint32_t high, uint32_t x,
                                               int columns) const {
    constexpr int kOwn = kChunk / kBlock / kWarps;  // blocks of a whole chunk
    const Blocks blocks(kWhole ? kChunk : columns);
    const uint32_t first = static_cast<uint32_t>(blocks.begin) * (kBlock * 2);
    uint4 l[kOwn], h[kOwn], part[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t offset = first + static_cast<uint32_t>(i) * (kBlock * 2);
      if (!kWhole) {
        l[i] = h[i] = part[i] = uint4{};
        if (blocks.begin + i >= blocks.end) continue;
      }
      l[i] = sm90::load_shared16(low + offset);
      h[i] = sm90::load_shared16(high + offset);
      part[i] = load_x(x + offset);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) multiply(sums, l[i], h[i], part[i]);
  }

  template <int kStages>
  __device__ __forceinline__ Sums screen_group(WeightStream<kStages>& stream, int width,
                                               const ScreenX& x) const {
    constexpr int kOwn = kScreenPiece / kScreenBlock / kWarps;  // blocks of a whole piece
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kScreenPiece) {
      const int columns = min(kScreenPiece, width - column), blocks = columns / kScreenBlock;
      const int first = static_cast<int>(threadIdx.x) / 32 * kOwn;
      const uint32_t row = stream.take() + static_cast<uint32_t>(row_ * stream.pitch());
      const uint32_t row_high = row + static_cast<uint32_t>(kPairs * stream.pitch());
      uint4 l[kOwn], h[kOwn], planes[kOwn];
      float low_scale[kOwn], high_scale[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // Of blocks that do not exist, the last one's, times 0.
        const int block = min(first + i, blocks - 1);
        const auto at = static_cast<uint32_t>(block * kScreenBlock + at_);
        const auto scale_at = static_cast<uint32_t>(columns + block * 2);
        l[i] = sm90::load_shared16(row + at);
        h[i] = sm90::load_shared16(row_high + at);
        planes[i] = x.load(column / kScreenBlock + block);
        const float step = first + i < blocks ? x.step(column / kScreenBlock + block) : 0.0f;
        low_scale[i] = sm90::load_shared_bf16(row + scale_at) * step;
        high_scale[i] = sm90::load_shared_bf16(row_high + scale_at) * step;
      }
      int32_t part[kOwn][4] = {};  // of the planes, of a low and a high row
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sm90::mma_16x8x32(part[i], l[i].x, h[i].x, l[i].y, h[i].y, planes[i].x, planes[i].y);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sm90::mma_16x8x32(part[i], l[i].z, h[i].z, l[i].w, h[i].w, planes[i].z, planes[i].w);
      }
      stream.release();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const auto value = [&](int j) {
          return static_cast<float>(256 * part[i][j] + part[i][j + 1]);
        };
        sums.part[0][0] = fmaf(low_scale[i], value(0), sums.part[0][0]);
        sums.part[1][0] = fmaf(high_scale[i], value(2), sums.part[1][0]);
      }
    }
    return sums;
  }

  // In the order of stream_group, so that a row's product is the same whichever way it comes.
  __device__ __forceinline__ Sums extra_group(int width, const Rows& rows) const {
    constexpr int kOwn = kChunk / kBlock / kWarps, kChunks = 2;  // on their way
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kChunks * kChunk) {
      uint4 low[kChunks][kOwn] = {}, high[kChunks][kOwn] = {};
      int first[kChunks], count[kChunks];  // of this warp's columns, of its blocks
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int begin = column + c * kChunk;
        const Blocks blocks(max(min(kChunk, width - begin), 0));
        first[c] = begin + blocks.begin * kBlock;
        count[c] = blocks.end - blocks.begin;
        const int k = first[c] + at_ / 2;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (i >= count[c] || k + i * kBlock >= width) continue;
          const auto load = [&](const __nv_bfloat16* row) {
            return __ldcs(reinterpret_cast<const uint4*>(row + k + i * kBlock));
          };
          if (rows.low != nullptr) low[c][i] = load(rows.low);
          if (rows.high != nullptr) high[c][i] = load(rows.high);
        }
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (i >= count[c]) break;
          multiply(sums, low[c][i], high[c][i],
                   load_x(static_cast<uint32_t>(first[c] + i * kBlock) * 2));
        }
      }
    }
    return sums;
  }

  __device__ __forceinline__ void store_partial(int group, const Sums& sums) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    auto& partial = shared_.partial[group][warp];
    if constexpr (kTokens == 1) {
      if (lane % 4 != 0) return;
      partial[lane / 4][0] = sums.part[0][0] + sums.part[0][3];
      partial[lane / 4 + kPairs][0] = sums.part[1][0] + sums.part[1][3];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane % 4 * 2 + i % 2;
        partial[lane / 4 + i / 2 * kPairs][token] = sums.part[0][i] + sums.part[1][i];
      }
    }
  }

  // A warp takes a group's token, a team of lanes a pair of it.
  template <typename Finish>
  __device__ __forceinline__ void finish_batch(int count, const Finish& finish) const {
    sync_threads();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int group = warp / kTokens, token = warp % kTokens, pair = lane / kTeam;
    if (group >= count || token >= tokens_) return;
    const auto& partial = shared_.partial[group];
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps / kTeam; ++i) {
      const int from = i * kTeam + lane % kTeam;
      low += partial[from][pair][token];
      high += partial[from][pair + kPairs][token];
    }
#pragma unroll
    for (int offset = 1; offset < kTeam; offset *= 2) {
      low += __shfl_xor_sync(~0u, low, offset);
      high += __shfl_xor_sync(~0u, high, offset);
    }
    if (lane % kTeam == 0) finish(group, token, pair, low, high);
  }

  Shared& shared_;
  const int tokens_;
  uint32_t x_;    // this lane's token in shared memory, 0: past the tokens
  int row_, at_;  // this lane's rows of a group, and byte of a block
};

}  // namespace twell::decode
