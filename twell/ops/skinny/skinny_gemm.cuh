// SPDX-License-Identifier: Apache-2.0
// The skinny GEMM of decoding: y = x w^T for x of 1 to 8 tokens, bound by reading w once.
//
// mma.sync takes 16 rows of w, a group, as its 16-row operand and the tokens as its 8 columns. A
// group is eight pairs of a "low" and a "high" row; a caller chooses them so that one thread gets
// both sums it needs together: the two halves of a rotation, a neuron's gate and up. The eight
// warps of a CTA split the width, and their partial sums are added in a fixed order.
//
// A product's sum does not depend on the order of its terms, so the eight values of a 16-byte piece
// may stand for any eight k, as long as both operands agree.
//
// Weights are bf16, and x too, or e4m3 (uint8_t), which one instruction widens to f16 two at a
// time; x is f16 then, times a power of two for each token (halves.cuh). A piece has sixteen of
// them.
//
// How weights arrive is a subject of its own in each kernel. Here: a ring buffer in shared memory
// that one warp fills by TMA across the steps of a persistent kernel (decode_layers_sm90.cu), and
// direct loads of rows that are known only at run time. In layer_ops.cu: cp.async into slots
// private to each thread, which need no barrier, in kernels that end after one product. In
// ops/ffn/few_tokens/decode_rows_sm90.cu: all rows of a CTA at once, with x in registers and 16
// warps.
#pragma once

#include "twell/format/gate_screen.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/half_pair.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/warp_mma.cuh"

namespace twell::skinny_gemm {

inline constexpr int kWarps = 8;  // that multiply
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kPairs = 8;           // of a low and a high row, per group
inline constexpr int kGroup = 2 * kPairs;  // rows
inline constexpr int kBlock = 32;          // values of a row that four lanes read together
inline constexpr int kChunk = 1024;        // columns of a ring buffer stage
// The same of weights of type W: as many bytes.
template <typename W>
inline constexpr int kBlockOf = kBlock * 2 / static_cast<int>(sizeof(W));
template <typename W>
inline constexpr int kChunkOf = kChunk * 2 / static_cast<int>(sizeof(W));

template <typename W>
struct RowsOf {
  const W *low, *high;  // null: zeros
};
using Rows = RowsOf<__nv_bfloat16>;

// The blocks of some columns that this warp multiplies.
struct Blocks {
  int begin, end;
  __device__ explicit Blocks(int columns, int block = kBlock) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int blocks = (columns + block - 1) / block, share = (blocks + kWarps - 1) / kWarps;
    begin = min(warp * share, blocks);
    end = min(begin + share, blocks);
  }
};

// Bytes between rows in shared memory, of bf16 unless said: 64 more than a multiple of 128, so that
// lanes that read 64 bytes each of neighbouring rows read different banks.
__host__ __device__ inline int row_pitch(int columns, int value_bytes = 2) {
  return (columns * value_bytes + 127) / 128 * 128 + 64;
}
// The same of rows of x for weights of type W. Beside e4m3, lanes read 16 bytes, 32 bytes apart.
template <typename W>
__host__ __device__ inline int input_pitch(int columns) {
  return sizeof(W) == 1 ? (columns * 2 + 127) / 128 * 128 + 16 : row_pitch(columns);
}

// Barrier of the warps that multiply.
__device__ __forceinline__ void sync_threads() { gpu::named_barrier(1, kThreads); }

// --- The ring buffer ---
// A stage is up to 16 rows of up to kChunk columns. One warp fills stages by TMA, the eight others
// read them in the same order.
template <int kStages>
class RowRing {
 public:
  struct Shared {
    uint64_t full[kStages], empty[kStages];
  };

  // All threads call this before any other use; the caller synchronises the CTA afterwards.
  __device__ __forceinline__ static void init(Shared& shared) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kStages; ++i) {
      gpu::barrier_init(gpu::smem_address(&shared.full[i]), 1);
      gpu::barrier_init(gpu::smem_address(&shared.empty[i]), kWarps);
    }
    gpu::fence_barrier_init();
  }

  // pitch: bytes between the rows of a stage.
  __device__ __forceinline__ RowRing(Shared& shared, uint32_t ring, int pitch)
      : full_(gpu::smem_address(shared.full)),
        empty_(gpu::smem_address(shared.empty)),
        ring_(ring),
        pitch_(pitch) {}

  // Waits for the next stage and returns the address of its first row.
  __device__ __forceinline__ uint32_t take() {
    gpu::barrier_wait(full_ + at_.stage * 8, at_.parity);
    const uint32_t rows = ring_ + static_cast<uint32_t>(at_.stage * kGroup * pitch_);
    at_.advance();
    return rows;
  }
  // Hands back the oldest stage that this warp took.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) gpu::barrier_arrive(empty_ + released_.stage * 8);
    released_.advance();
  }
  __device__ __forceinline__ int pitch() const { return pitch_; }

  // For the filling warp: how many stages may be requested and not yet there.
  __device__ __forceinline__ void limit_requests(int most) { most_requested_ = most; }
  // For the filling warp: waits until the next stage is free and requests its rows, one per lane.
  // Where a row does not exist, shared memory keeps what it held.
  __device__ __forceinline__ void fill(const void* row, bool exists, int row_bytes, int pitch) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t full = full_ + at_.stage * 8, bytes = static_cast<uint32_t>(row_bytes);
    gpu::barrier_wait(empty_ + at_.stage * 8, at_.parity ^ 1);
#pragma unroll 1
    for (; requested_ >= most_requested_; --requested_) {
      gpu::barrier_wait(full_ + landed_.stage * 8, landed_.parity);
      landed_.advance();
    }
    ++requested_;
    const uint32_t rows = __popc(__ballot_sync(~0u, exists));
    if (lane == 0) gpu::barrier_arrive_expect(full, rows * bytes);
    __syncwarp();
    if (exists) {
      gpu::bulk_load(ring_ + static_cast<uint32_t>(at_.stage * kGroup * pitch_ + lane * pitch), row,
                     bytes, full);
    }
    at_.advance();
  }

 private:
  const uint32_t full_, empty_, ring_;
  const int pitch_;
  gpu::RingCursor<kStages> at_;
  gpu::RingCursor<kStages> released_;  // next stage that a multiplying warp hands back
  gpu::RingCursor<kStages> landed_;    // oldest stage that the filling warp has not seen arrive
  int requested_ = 0, most_requested_ = 0;
};

// --- x for products with 8-bit screens ---
// One token's x in shared memory as gate_screen.h describes it: 16-bit integers and a step for each
// block of columns. The integers are split into two planes of signed bytes, 256 * high + low, which
// are two columns of one product.
class ScreenX {
 public:
  __host__ __device__ static int bytes(int width) {
    return 2 * plane(width) + width / kScreenBlock * static_cast<int>(sizeof(float));
  }

  __device__ __forceinline__ ScreenX(uint8_t* memory, int width)
      : memory_(memory), plane_(plane(width)) {}

  // Stores four bf16 values of x. All lanes of a half warp call it: together they hold a block.
  __device__ __forceinline__ void store(int quad, const uint2& x) const {
    uint32_t most = 0;
    for (const uint32_t pair : {x.x, x.y}) {
      most = max(most, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
    }
    most = __reduce_max_sync(0xffffu << (threadIdx.x & 16), most);
    const float largest = __uint_as_float(most << 16);  // not finite if any value is not
    const bool takes = screen_takes(largest);
    const float per_value = takes ? __fdividef(static_cast<float>(kScreenSteps), largest) : 0.0f;
    // 1.5 * 2^23: a small number added to it is rounded to an integer in the low bits.
    constexpr float kToInteger = 12582912.0f;
    const float2 a = gpu::to_floats(x.x), b = gpu::to_floats(x.y);
    const uint32_t v[4] = {__float_as_uint(fmaf(a.x, per_value, kToInteger)),
                           __float_as_uint(fmaf(a.y, per_value, kToInteger)),
                           __float_as_uint(fmaf(b.x, per_value, kToInteger)),
                           __float_as_uint(fmaf(b.y, per_value, kToInteger))};
    // Byte 0 of each integer; byte 1 after a carry, because byte 0 counts as signed.
    const uint32_t low =
        __byte_perm(__byte_perm(v[0], v[1], 0x40), __byte_perm(v[2], v[3], 0x40), 0x5410);
    const uint32_t high = __byte_perm(__byte_perm(v[0] + 128, v[1] + 128, 0x51),
                                      __byte_perm(v[2] + 128, v[3] + 128, 0x51), 0x5410);
    *reinterpret_cast<uint32_t*>(memory_ + quad * 4) = high;
    *reinterpret_cast<uint32_t*>(memory_ + plane_ + quad * 4) = low;
    if (threadIdx.x % 16 == 0) {
      const float step = takes || largest == 0.0f ? largest * (1.0f / kScreenSteps) : NAN;
      reinterpret_cast<float*>(memory_ + 2 * plane_)[quad / kQuads] = step;
    }
  }

  // This lane's part of the 8-column operand: 16 bytes of its plane, zeros for columns 2 to 7.
  __device__ __forceinline__ uint4 load(int block) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4;
    if (column > 1) return uint4{};
    return *reinterpret_cast<const uint4*>(memory_ + column * plane_ + block * kScreenBlock +
                                           lane % 4 * 16);
  }
  __device__ __forceinline__ float step(int block) const {
    return reinterpret_cast<const float*>(memory_ + 2 * plane_)[block];
  }

 private:
  static constexpr int kQuads = kScreenBlock / 4;
  // Lanes that read both planes at once read different banks.
  __host__ __device__ static int plane(int width) { return (width + 127) / 128 * 128 + 64; }

  uint8_t* memory_;
  int plane_;
};

// --- The product ---
// Of each 16-byte piece, one instruction multiplies words 0 and 2, another words 1 and 3. A single
// token leaves columns free, so that one instruction does both for eight rows: its rows 0-7 are
// words 0 and 2, its rows 8-15 words 1 and 3 of the same rows, and two columns hold the matching
// words of x. The sums are the same for any number of tokens.
//
// The partial sums of kBatch groups are added together: all warps wait while that happens.
// kTokens: at least the number of tokens. W: the type of the weights.
template <int kTokens, typename W = __nv_bfloat16>
class Product {
 public:
  static constexpr int kBatch = kWarps / kTokens;  // groups whose sums are added together
  struct Shared {
    float partial[kBatch][kWarps][kGroup]
                 [kTokens + (kTokens > 1)];  // padded against bank conflicts
  };

  // x: a row per token in shared memory, `pitch` bytes apart, padded with zeros to a whole block.
  __device__ __forceinline__ Product(int tokens, Shared& shared, uint32_t x, int pitch)
      : shared_(shared), tokens_(tokens) {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4;
    x_ = x + static_cast<uint32_t>(lane % 4 * (16 * kParts));
    if (kTokens == 1) {
      x_ += static_cast<uint32_t>(column % 2 * 4);  // columns 2 to 7 are not used
    } else {
      x_ = column < tokens ? x_ + static_cast<uint32_t>(column * pitch) : 0;
    }
    row_ = lane / 4;
    at_ = lane % 4 * 16;
  }

  // The sums of a batch that this thread calls `finish` with, if any.
  struct Finisher {
    bool finishes;
    int group, token, pair;  // group within the batch
  };
  __device__ __forceinline__ Finisher finisher() const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int token = warp % kTokens;
    return {lane % kTeam == 0 && token < tokens_, warp / kTokens, token, lane / kTeam};
  }

  // Multiplies the ring buffer's next `count` groups; one thread per sum calls
  // finish(group, token, pair, low, high). All threads that multiply call this, and synchronise
  // before the next call.
  template <int kStages, typename Finish>
  __device__ __forceinline__ void groups(int count, RowRing<kStages>& ring, int width,
                                         const Finish& finish) {
    if constexpr (kHolds) {
      if (width == kChunk) return held_groups(count, ring, finish);
    }
    in_batches(
        count, [&](int) { return ring_group(ring, width); }, finish);
  }

  // The same with rows of a screen, for one token.
  template <int kStages, typename Finish>
  __device__ __forceinline__ void screen_groups(int count, RowRing<kStages>& ring, int width,
                                                const ScreenX& x, const Finish& finish) {
    in_batches(
        count, [&](int) { return screen_group(ring, width, x); }, finish);
  }

  // The same with rows from global memory; rows(group, pair) gives those of this lane.
  template <typename RowsOf, typename Finish>
  __device__ __forceinline__ void loaded_groups(int count, int width, const RowsOf& rows,
                                                const Finish& finish) {
    in_batches(
        count, [&](int group) { return loaded_group(width, rows(group, row_)); }, finish);
  }

 private:
  static constexpr int kTeam = 4;  // lanes that add the partial sums of a pair
  static constexpr int kBlock = kBlockOf<W>, kChunk = kChunkOf<W>;
  static constexpr int kParts = 2 / static_cast<int>(sizeof(W));  // pieces of x for one of weights
  struct Pieces {
    uint4 of[kParts];
  };
  struct Sums {
    float part[2][4] = {};  // one token: of low and of high rows; else of words 0, 2 and of 1, 3
  };

  __device__ __forceinline__ static void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (sizeof(W) == 1) {
      gpu::mma_16x8x16_f16(d, a0, a1, a2, a3, b0, b1);
    } else {
      gpu::mma_16x8x16(d, a0, a1, a2, a3, b0, b1);
    }
  }
  __device__ __forceinline__ static void multiply_piece(Sums& sums, const uint4& low,
                                                        const uint4& high, const uint4& x) {
    if constexpr (kTokens == 1) {
      mma(sums.part[0], low.x, low.y, low.z, low.w, x.x, x.z);
      mma(sums.part[1], high.x, high.y, high.z, high.w, x.x, x.z);
    } else {
      mma(sums.part[0], low.x, high.x, low.z, high.z, x.x, x.z);
      mma(sums.part[1], low.y, high.y, low.w, high.w, x.y, x.w);
    }
  }
  __device__ __forceinline__ static void multiply(Sums& sums, const uint4& low, const uint4& high,
                                                  const Pieces& x) {
    if constexpr (sizeof(W) == 1) {
      multiply_piece(sums, gpu::e4m3_to_halves(low.x, low.y), gpu::e4m3_to_halves(high.x, high.y),
                     x.of[0]);
      multiply_piece(sums, gpu::e4m3_to_halves(low.z, low.w), gpu::e4m3_to_halves(high.z, high.w),
                     x.of[1]);
    } else {
      multiply_piece(sums, low, high, x.of[0]);
    }
  }
  __device__ __forceinline__ Pieces load_x(uint32_t offset) const {
    Pieces x;
#pragma unroll
    for (int i = 0; i < kParts; ++i) x.of[i] = load_x_piece(offset + static_cast<uint32_t>(i) * 16);
    return x;
  }
  // 16 bytes of x; for one token, the two words of them that this lane's column holds.
  __device__ __forceinline__ uint4 load_x_piece(uint32_t offset) const {
    if constexpr (kTokens == 1) {
      return {gpu::load_shared4(x_ + offset), 0, gpu::load_shared4(x_ + offset + 8), 0};
    }
    return x_ != 0 ? gpu::load_shared16(x_ + offset) : uint4{};
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

  // Whether this lane's part of x stays in registers where a row is one stage: one token, whose
  // e4m3 weights have twice as much of x for each byte. Two groups are multiplied together then, so
  // that their loads and instructions overlap.
  static constexpr bool kHolds = kTokens == 1 && sizeof(W) == 1;
  static constexpr int kOwnBlocks = kChunk / kBlock / kWarps;

  template <int kStages, typename Finish>
  __device__ __forceinline__ void held_groups(int count, RowRing<kStages>& ring,
                                              const Finish& finish) {
    const auto first = static_cast<uint32_t>(static_cast<int>(threadIdx.x) / 32 * kOwnBlocks *
                                             kBlock);  // this warp's first column
    Pieces x[kOwnBlocks];
#pragma unroll
    for (int i = 0; i < kOwnBlocks; ++i) {
      x[i] = load_x((first + static_cast<uint32_t>(i * kBlock)) * 2);
    }
    const auto load = [&](uint4(&l)[kOwnBlocks], uint4(&h)[kOwnBlocks]) {
      const uint32_t low = ring.take() + static_cast<uint32_t>(row_ * ring.pitch() + at_) + first;
      const uint32_t high = low + static_cast<uint32_t>(kPairs * ring.pitch());
#pragma unroll
      for (int i = 0; i < kOwnBlocks; ++i) {
        l[i] = gpu::load_shared16(low + static_cast<uint32_t>(i * kBlock));
        h[i] = gpu::load_shared16(high + static_cast<uint32_t>(i * kBlock));
      }
    };
#pragma unroll 1
    for (int base = 0; base < count; base += kBatch) {
      const int batch = min(kBatch, count - base);
      int i = 0;
#pragma unroll 1
      for (; i + 1 < batch; i += 2) {
        uint4 l[2][kOwnBlocks], h[2][kOwnBlocks];
        load(l[0], h[0]);
        load(l[1], h[1]);
        Sums sums[2];
#pragma unroll
        for (int j = 0; j < kOwnBlocks; ++j) {
          multiply(sums[0], l[0][j], h[0][j], x[j]);
          multiply(sums[1], l[1][j], h[1][j], x[j]);
        }
        ring.release();
        ring.release();
        store_partial(i, sums[0]);
        store_partial(i + 1, sums[1]);
      }
      if (i < batch) {
        uint4 l[kOwnBlocks], h[kOwnBlocks];
        load(l, h);
        Sums sums;
#pragma unroll
        for (int j = 0; j < kOwnBlocks; ++j) multiply(sums, l[j], h[j], x[j]);
        ring.release();
        store_partial(i, sums);
      }
      finish_batch(batch, [&](int at, int token, int pair, float low, float high) {
        finish(base + at, token, pair, low, high);
      });
      if (base + kBatch < count) sync_threads();
    }
  }

  template <int kStages>
  __device__ __forceinline__ Sums ring_group(RowRing<kStages>& ring, int width) const {
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kChunk) {
      const int columns = min(kChunk, width - column);
      const uint32_t low = ring.take() + static_cast<uint32_t>(row_ * ring.pitch() + at_);
      const uint32_t high = low + static_cast<uint32_t>(kPairs * ring.pitch());
      const auto x = static_cast<uint32_t>(column) * 2;
      // Only for one token do the unrolled loads of a whole chunk fit in the registers.
      if (kTokens == 1 && columns == kChunk) {
        ring_chunk<true>(sums, low, high, x, columns);
      } else {
        ring_chunk<false>(sums, low, high, x, columns);
      }
      ring.release();
    }
    return sums;
  }
  // This warp's blocks of a chunk; kWhole: of kChunk columns.
  template <bool kWhole>
  __device__ __forceinline__ void ring_chunk(Sums& sums, uint32_t low, uint32_t high, uint32_t x,
                                             int columns) const {
    constexpr int kOwn = kChunk / kBlock / kWarps;  // blocks of a whole chunk
    constexpr auto kBlockBytes = static_cast<uint32_t>(kBlock * sizeof(W));
    const Blocks blocks(kWhole ? kChunk : columns, kBlock);
    const uint32_t first = static_cast<uint32_t>(blocks.begin) * kBlockBytes;
    uint4 l[kOwn], h[kOwn];
    Pieces part[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t offset = first + static_cast<uint32_t>(i) * kBlockBytes;
      if (!kWhole) {
        l[i] = h[i] = uint4{};
        part[i] = Pieces{};
        if (blocks.begin + i >= blocks.end) continue;
      }
      l[i] = gpu::load_shared16(low + offset);
      h[i] = gpu::load_shared16(high + offset);
      part[i] = load_x(x + offset * kParts);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) multiply(sums, l[i], h[i], part[i]);
  }

  template <int kStages>
  __device__ __forceinline__ Sums screen_group(RowRing<kStages>& ring, int width,
                                               const ScreenX& x) const {
    constexpr int kOwn = kScreenPiece / kScreenBlock / kWarps;  // blocks of a whole piece
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kScreenPiece) {
      const int columns = min(kScreenPiece, width - column), blocks = columns / kScreenBlock;
      const int first = static_cast<int>(threadIdx.x) / 32 * kOwn;
      const uint32_t row = ring.take() + static_cast<uint32_t>(row_ * ring.pitch());
      const uint32_t row_high = row + static_cast<uint32_t>(kPairs * ring.pitch());
      uint4 l[kOwn], h[kOwn], planes[kOwn];
      float low_scale[kOwn], high_scale[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // Past the last block, its values count again, scaled by 0.
        const int block = min(first + i, blocks - 1);
        const auto at = static_cast<uint32_t>(block * kScreenBlock + at_);
        const auto scale_at = static_cast<uint32_t>(columns + block * 2);
        l[i] = gpu::load_shared16(row + at);
        h[i] = gpu::load_shared16(row_high + at);
        planes[i] = x.load(column / kScreenBlock + block);
        const float step = first + i < blocks ? x.step(column / kScreenBlock + block) : 0.0f;
        low_scale[i] = gpu::load_shared_bf16(row + scale_at) * step;
        high_scale[i] = gpu::load_shared_bf16(row_high + scale_at) * step;
      }
      int32_t part[kOwn][4] = {};  // low row by each plane, high row by each plane
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        gpu::mma_16x8x32(part[i], l[i].x, h[i].x, l[i].y, h[i].y, planes[i].x, planes[i].y);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        gpu::mma_16x8x32(part[i], l[i].z, h[i].z, l[i].w, h[i].w, planes[i].z, planes[i].w);
      }
      ring.release();
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

  // Adds in the order of ring_group, so that a row's product does not depend on how it was loaded.
  __device__ __forceinline__ Sums loaded_group(int width, const RowsOf<W>& rows) const {
    constexpr int kOwn = kChunk / kBlock / kWarps,
                  kChunks = sizeof(W) == 1 ? 1 : 2;  // loaded ahead
    Sums sums;
#pragma unroll 1
    for (int column = 0; column < width; column += kChunks * kChunk) {
      uint4 low[kChunks][kOwn] = {}, high[kChunks][kOwn] = {};
      int first[kChunks], count[kChunks];  // this warp's first column, its blocks
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int begin = column + c * kChunk;
        const Blocks blocks(max(min(kChunk, width - begin), 0), kBlock);
        first[c] = begin + blocks.begin * kBlock;
        count[c] = blocks.end - blocks.begin;
        const int k = first[c] + at_ / static_cast<int>(sizeof(W));
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (i >= count[c] || k + i * kBlock >= width) continue;
          const auto load = [&](const W* row) {
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

  // A warp per group and token, a team of lanes per pair.
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
  uint32_t x_;    // address of this lane's token, or 0 past the last one
  int row_, at_;  // this lane's pair, and its byte within a block
};

}  // namespace twell::skinny_gemm
