// SPDX-License-Identifier: Apache-2.0
// Packing one WGMMA accumulator tile, 64 tokens by 256 neurons per warpgroup, into TwELL: from
// registers, in steps that hide behind the next tile's GEMM, or, where there is no next tile, by
// way of shared memory. In registers the 256 columns of a row are spread over the 4 lanes of a
// quad. Lane t of the quad writes its own non-zeros after those of lanes 0 .. t-1.
#pragma once

#include "twell/ops/ffn/hopper/gate_gemm_sm90.h"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::gate_gemm {

using sm90::opaque;
using sm90::relu_bf16x2;

// A staged row of 256 bf16. Its 16-byte pieces are XORed with the row, so that neither writing nor
// reading has bank conflicts.
inline constexpr uint32_t kStagedRowBytes = kTileN * 2;
inline constexpr int kGroupPairs = 4;  // of each row, that a packing step stores

// Of a lane's 32 pairs of a row: which halves are not zero. Pair i's lower half is bit i % 16, its
// upper half bit 16 + i % 16, of `first` for i < 16.
struct NonzeroMask {
  uint32_t first, second;

  __device__ __forceinline__ explicit NonzeroMask(const uint32_t (&pairs)[32])
      : first(of_16(pairs)), second(of_16(pairs + 16)) {}
  __device__ __forceinline__ uint32_t count() const { return __popc(first) + __popc(second); }
  // Bit i: pair i has a non-zero.
  __device__ __forceinline__ uint32_t pairs() const {
    return __byte_perm(first | first >> 16, second | second >> 16, 0x5410);
  }

 private:
  __device__ __forceinline__ static uint32_t of_16(const uint32_t* pairs) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 15; i >= 0; --i) mask = mask + mask + __vminu2(opaque(pairs[i]), 0x00010001u);
    return mask;
  }
};

// Stores `word` at base + at, and moves `at` on, if the half of `pair` it is made of is not zero.
// Predicated, not branched: divergence would cost more than the few instructions it skips.
template <bool UpperHalf>
__device__ __forceinline__ void append(uint32_t* base, uint32_t& at, uint32_t pair, uint32_t word) {
  if constexpr (UpperHalf) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u64 to;\nsetp.gt.u32 p, %1, 0xffff;\n"
        "cvt.u64.u32 to, %0;\nadd.u64 to, to, %3;\n"
        "@p st.global.b32 [to], %2;\n@p add.u32 %0, %0, 4;\n}\n"
        : "+r"(at)
        : "r"(pair), "r"(word), "l"(base)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u64 to;\n.reg .b32 half;\n"
        "and.b32 half, %1, 0xffff;\nsetp.ne.b32 p, half, 0;\n"
        "cvt.u64.u32 to, %0;\nadd.u64 to, to, %3;\n"
        "@p st.global.b32 [to], %2;\n@p add.u32 %0, %0, 4;\n}\n"
        : "+r"(at)
        : "r"(pair), "r"(word), "l"(base)
        : "memory");
  }
}

// The activations of a tile as bf16 pairs, between the end of its GEMM and their packing.
class PackedTile {
 public:
  // N columns.
  template <int N>
  __device__ __forceinline__ void take(const float (&acc)[128]) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      upper_[i] = relu_bf16x2(acc[4 * i], acc[4 * i + 1]);
      lower_[i] = relu_bf16x2(acc[4 * i + 2], acc[4 * i + 3]);
    }
  }

  // To be packed, 64 rows from first_row on and 256 columns, in up to 10 steps, each short enough
  // to hide behind one k-step of the next tile: counting, finding places, then a step per group of
  // pairs that is not all zeros.
  __device__ __forceinline__ void begin(int first_row, int tile_index) {
    row_ = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    tile_ = tile_index;
    next_ = Step::kCount;
    pairs_ = ~0u;
  }
  __device__ __forceinline__ bool done() const { return pairs_ == 0; }
  // Runs the next step; nothing once all are done.
  __device__ __forceinline__ void advance(const PackTarget& out) {
    if (pairs_ == 0) return;
    if (next_ == Step::kCount) {
      count();
      next_ = Step::kPlace;
      return;
    }
    if (next_ == Step::kPlace) {
      place(out);
      next_ = Step::kStore;
      return;
    }
    const int group = (__ffs(pairs_) - 1) / kGroupPairs;
    pairs_ &= ~(((1u << kGroupPairs) - 1) << group * kGroupPairs);
    switch (group) {
      case 0:
        store<0>();
        break;
      case 1:
        store<1>();
        break;
      case 2:
        store<2>();
        break;
      case 3:
        store<3>();
        break;
      case 4:
        store<4>();
        break;
      case 5:
        store<5>();
        break;
      case 6:
        store<6>();
        break;
      case 7:
        store<7>();
        break;
      default:
        break;
    }
  }

  // To be packed by way of shared memory: N columns from N * part on of 64 staged rows.
  template <int N>
  __device__ __forceinline__ void stage(uint32_t staged, int part) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t to = staged + row * kStagedRowBytes + part * (N * 2);
    const uint32_t swizzle = (lane / 16) ^ (row % 8);
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
      sm90::store_matrices(to + i / 8 * 128 + ((i % 8) ^ swizzle) * 16, upper_[i], lower_[i],
                           upper_[i + 1], lower_[i + 1]);
    }
  }

 private:
  enum class Step { kCount, kPlace, kStore };

  __device__ __forceinline__ void count() {
    const NonzeroMask upper(upper_), lower(lower_);
    counts_ = upper.count() | lower.count() << 16;
    lane_pairs_ = upper.pairs() | lower.pairs();
  }

  // Writes rows' counts, finds this lane's places among the quad and which pairs any lane has
  // something in, and spills rows that do not fit. Every lane of the warp calls it.
  __device__ __forceinline__ void place(const PackTarget& out) {
    const int lane_in_quad = threadIdx.x % 4;
    uint32_t through = counts_;  // inclusive prefix sums over the quad
    const uint32_t one_back = __shfl_up_sync(~0u, through, 1, 4);
    if (lane_in_quad >= 1) through += one_back;
    const uint32_t two_back = __shfl_up_sync(~0u, through, 2, 4);
    if (lane_in_quad >= 2) through += two_back;
    const uint32_t upper = through & 0xffff, lower = through >> 16, slots = out.slots;
    const uint32_t before = through - counts_;
    const uint32_t slot = static_cast<uint32_t>(row_) * out.tiles + tile_;
    const uint32_t below = 8u * out.tiles;  // slots from this lane's upper row to its lower one
    words_ = out.words + int64_t{slot} * slots;
    upper_at_ = (1 + (before & 0xffff)) * sizeof(uint32_t);
    lower_at_ = (below * slots + 1 + (before >> 16)) * sizeof(uint32_t);
    if (lane_in_quad == 3) {
      write_count(words_, upper, row_, out);
      write_count(words_ + below * slots, lower, row_ + 8, out);
    }
    if (__any_sync(~0u, upper >= slots || lower >= slots)) {
      const uint32_t totals = __shfl_sync(~0u, through, 3, 4);
      if ((totals & 0xffff) >= slots) spill(upper_, words_, slot, out);
      if (totals >> 16 >= slots) spill(lower_, words_ + below * slots, slot + below, out);
    }
    pairs_ = __reduce_or_sync(~0u, lane_pairs_);
  }

  __device__ __forceinline__ static void write_count(uint32_t* words, uint32_t total, int row,
                                                     const PackTarget& out) {
    if (row >= out.tokens) return;
    words[0] = total;
    if (total > 0) atomicAdd(out.row_nnz + row, total);
  }

  // A row that does not fit goes to its spill slot whole, zeros too; none of it is then left to be
  // packed.
  __device__ __forceinline__ static void spill(uint32_t (&pairs)[32], uint32_t* words,
                                               uint32_t slot, const PackTarget& out) {
    const int lane_in_quad = threadIdx.x % 4;
    if (lane_in_quad == 0) words[1] = slot;
    uint32_t* to = out.spill + int64_t{slot} * (kTileN / 2) + lane_in_quad;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      to[4 * i] = pairs[i];
      pairs[i] = 0;
    }
  }

  // A group of pairs of both rows. Rows past the last token have no non-zeros, since the copy
  // engine reads them as zeros.
  template <int Group>
  __device__ __forceinline__ void store() {
    constexpr int kFirst = Group * kGroupPairs;
    const uint32_t column = opaque((tile_ * kTileN + 2 * (threadIdx.x % 4)) & 0xffff) + 8 * kFirst;
#pragma unroll
    for (int i = 0; i < kGroupPairs; ++i) {
      const uint32_t upper = opaque(upper_[kFirst + i]), lower = opaque(lower_[kFirst + i]);
      store_pair(upper_at_, upper, column + 8 * i);
      store_pair(lower_at_, lower, column + 8 * i);
    }
  }

  // A pair whose first column mod 65536 is `column`, as words (value << 16 | column).
  __device__ __forceinline__ void store_pair(uint32_t& at, uint32_t pair, uint32_t column) {
    append<false>(words_, at, pair, __byte_perm(pair, column, 0x1054));
    append<true>(words_, at, pair, __byte_perm(pair, column + 1, 0x3254));
  }

  // Pair i of a lane holds columns 8i + 2t and 8i + 2t + 1.
  uint32_t upper_[32];            // row_
  uint32_t lower_[32];            // row_ + 8
  uint32_t counts_;               // this lane's of row_, and, shifted by 16, of row_ + 8
  uint32_t* words_;               // of row_
  uint32_t upper_at_, lower_at_;  // where this lane's next non-zeros go, in bytes behind words_
  int row_;
  int tile_;
  Step next_;
  uint32_t lane_pairs_;  // in which this lane has non-zeros
  uint32_t pairs_ = 0;   // that are still to be packed, the same in all lanes
};

// By a warp: row `row` of x, staged as row `r`, of the neurons of a tile, in column order.
__device__ __forceinline__ void pack_row(uint32_t staged, int r, int row, int tile,
                                         const PackTarget& out) {
  const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
  const uint32_t from = staged + r * kStagedRowBytes + ((lane / 4) ^ (r % 8)) * 16 + lane % 4 * 4;
  uint32_t pairs[4];  // pair j: columns 64 j + 2 lane, 64 j + 2 lane + 1
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pairs[j]) : "r"(from + j * 128) : "memory");
  }
  const uint32_t slot = static_cast<uint32_t>(row) * out.tiles + tile;
  uint32_t* words = out.words + int64_t{slot} * out.slots;
  if (!__any_sync(~0u, (pairs[0] | pairs[1] | pairs[2] | pairs[3]) != 0)) {
    if (lane == 0) words[0] = 0;
    return;
  }
  int before[4], total = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = __ballot_sync(~0u, (pairs[j] & 0xffff) != 0);
    const uint32_t high = __ballot_sync(~0u, pairs[j] >> 16 != 0);
    before[j] = total + __popc(low & below) + __popc(high & below);
    total += __popc(low) + __popc(high);
  }
  if (lane == 0) {
    words[0] = total;
    atomicAdd(out.row_nnz + row, total);
  }
  if (total < out.slots) {
    const uint32_t column = (tile * kTileN + 2 * lane) & 0xffff;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t* at = words + 1 + before[j];
      const bool has_low = (pairs[j] & 0xffff) != 0;
      if (has_low) at[0] = (pairs[j] << 16) + column + 64 * j;
      if (pairs[j] >> 16 != 0) at[has_low ? 1 : 0] = (pairs[j] & 0xffff0000u) + column + 64 * j + 1;
    }
  } else {
    if (lane == 0) words[1] = slot;
    uint32_t* spill = out.spill + int64_t{slot} * (kTileN / 2) + lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) spill[32 * j] = pairs[j];
  }
}

}  // namespace twell::gate_gemm
