// SPDX-License-Identifier: Apache-2.0
// Products of 16 rows of a weight at a time, eight pairs of a "low" and a "high" one, with up to 8
// tokens in shared memory, on mma.sync with the weights as the 16-row operand. A CTA's warps cut
// the width; their partial sums are added in a fixed order, those of several groups at a time: what
// happens between two groups, one warp does alone, and all wait for it. What is low and high is the
// finish's choice, which gets both sums of a pair together.
//
// A product's sum does not depend on the order of its terms, so the eight values of a piece stand
// for whichever k the instruction thinks they are, the same ones in both operands.
#pragma once

#include "twell/ops/decode_layers/weight_stream.cuh"

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
    const int lane = static_cast<int>(threadIdx.x) % 32, token = lane / 4;
    x_ = token < tokens ? x + static_cast<uint32_t>(token * pitch + lane % 4 * 16) : 0;
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
#pragma unroll 1
    for (int base = 0; base < count; base += kBatch) {
      const int batch = min(kBatch, count - base);
#pragma unroll 1
      for (int i = 0; i < batch; ++i) store_partial(i, stream_group(stream, width));
      finish_batch(batch, [&](int i, int token, int pair, float low, float high) {
        finish(base + i, token, pair, low, high);
      });
      if (base + kBatch < count) sync_threads();
    }
  }

  // With any rows, past the stream: rows(group, this lane's pair), finish as above.
  template <typename RowsOf, typename Finish>
  __device__ __forceinline__ void extra_groups(int count, int width, const RowsOf& rows,
                                               const Finish& finish) {
#pragma unroll 1
    for (int base = 0; base < count; base += kBatch) {
      const int batch = min(kBatch, count - base);
#pragma unroll 1
      for (int i = 0; i < batch; ++i) store_partial(i, extra_group(width, rows(base + i, row_)));
      finish_batch(batch, [&](int i, int token, int pair, float low, float high) {
        finish(base + i, token, pair, low, high);
      });
      if (base + kBatch < count) sync_threads();
    }
  }

 private:
  static constexpr int kTeam = 4;  // lanes that add up a pair's partial sums
  struct Sums {
    float part[2][4] = {};
  };

  __device__ __forceinline__ void multiply(Sums& sums, const uint4& low, const uint4& high,
                                           const uint4& x) const {
    sm90::mma_16x8x16(sums.part[0], low.x, high.x, low.y, high.y, x.x, x.y);
    sm90::mma_16x8x16(sums.part[1], low.z, high.z, low.w, high.w, x.z, x.w);
  }
  __device__ __forceinline__ uint4 load_x(uint32_t offset) const {
    return x_ != 0 ? sm90::load_shared16(x_ + offset) : uint4{};
  }

  template <int kStages>
  __device__ __forceinline__ Sums stream_group(WeightStream<kStages>& stream, int width) const {
    constexpr int kOwn = kChunk / kBlock / kWarps;  // blocks of a whole chunk
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kChunk) {
      const Blocks blocks(min(kChunk, width - column));
      const uint32_t first = static_cast<uint32_t>(blocks.begin) * (kBlock * 2);
      const uint32_t low =
          stream.take() + static_cast<uint32_t>(row_ * stream.pitch() + at_) + first;
      const uint32_t high = low + static_cast<uint32_t>(kPairs * stream.pitch());
      uint4 l[kOwn], h[kOwn], x[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t offset = static_cast<uint32_t>(i) * (kBlock * 2);
        l[i] = h[i] = x[i] = uint4{};
        if (blocks.begin + i >= blocks.end) continue;
        l[i] = sm90::load_shared16(low + offset);
        h[i] = sm90::load_shared16(high + offset);
        x[i] = load_x(static_cast<uint32_t>(column) * 2 + first + offset);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) multiply(sums, l[i], h[i], x[i]);
      stream.release();
    }
    return sums;
  }

  __device__ __forceinline__ Sums extra_group(int width, const Rows& rows) const {
    constexpr int kAtOnce = 8;
    const Blocks blocks(width);
    Sums sums;
#pragma unroll 1
    for (int block = blocks.begin; block < blocks.end; block += kAtOnce) {
      uint4 low[kAtOnce] = {}, high[kAtOnce] = {};
#pragma unroll
      for (int d = 0; d < kAtOnce; ++d) {
        const int k = (block + d) * kBlock + at_ / 2;
        if (block + d >= blocks.end || k >= width) break;
        if (rows.low != nullptr) low[d] = __ldcs(reinterpret_cast<const uint4*>(rows.low + k));
        if (rows.high != nullptr) high[d] = __ldcs(reinterpret_cast<const uint4*>(rows.high + k));
      }
#pragma unroll
      for (int d = 0; d < kAtOnce; ++d) {
        if (block + d >= blocks.end) break;
        multiply(sums, low[d], high[d], load_x(static_cast<uint32_t>(block + d) * (kBlock * 2)));
      }
    }
    return sums;
  }

  __device__ __forceinline__ void store_partial(int group, const Sums& sums) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane % 4 * 2 + i % 2;
      if (token < kTokens) {
        shared_.partial[group][warp][lane / 4 + i / 2 * kPairs][token] =
            sums.part[0][i] + sums.part[1][i];
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
