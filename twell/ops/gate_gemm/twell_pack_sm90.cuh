// SPDX-License-Identifier: Apache-2.0
// Packing one WGMMA accumulator tile, 64 tokens by 256 neurons per warpgroup, into TwELL: from
// registers, in steps that hide behind the next tile's GEMM, or, where there is no next tile, by
// way of shared memory. In registers the 256 columns of a row are spread over the 4 lanes of a
// quad. Lane t of the quad writes its own non-zeros after those of lanes 0 .. t-1.
#pragma once

#include "twell/ops/gate_gemm/gate_gemm_sm90.h"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::gate_gemm {

using sm90::opaque;
using sm90::relu_bf16x2;

// A staged row of 256 bf16. Its 16-byte pieces are XORed with the row, so that neither writing nor
// reading has bank conflicts.
inline constexpr uint32_t kStagedRowBytes = kTileN * 2;
// Groups of two pairs of both rows, a bit each.
inline constexpr uint32_t kAllGroups = 0xffff;

// Of this lane's 64 values of a row.
__device__ __forceinline__ int count_nonzeros(const uint32_t (&pairs)[32]) {
  uint32_t counts = 0;  // of lower and of upper halves
#pragma unroll
  for (int i = 0; i < 32; ++i) counts += __vminu2(opaque(pairs[i]), 0x00010001u);
  return static_cast<int>((counts & 0xffff) + (counts >> 16));
}

// One row of a tile on its way to memory. Pair i of a lane holds columns 8i + 2t and 8i + 2t + 1.
struct RowCursor {
  uint32_t* words;  // of the row
  uint32_t at;      // where this lane's next non-zero goes, in bytes

  // Writes the count and finds this lane's place among the quad. Every lane of the warp calls it.
  // Returns this lane's first pair in the spill slot, null where the row fits.
  __device__ __forceinline__ uint32_t* begin(const uint32_t (&pairs)[32], const PackTarget& out,
                                             int row, int tile) {
    const int lane_in_quad = threadIdx.x % 4;
    const int count = count_nonzeros(pairs);
    int through = count;  // inclusive prefix sum over the quad
    const int one_back = __shfl_up_sync(~0u, through, 1, 4);
    if (lane_in_quad >= 1) through += one_back;
    const int two_back = __shfl_up_sync(~0u, through, 2, 4);
    if (lane_in_quad >= 2) through += two_back;
    const int total = __shfl_sync(~0u, through, 3, 4);
    const uint32_t slot = static_cast<uint32_t>(row) * out.tiles + tile;
    words = out.words + int64_t{slot} * out.slots;
    at = (1 + through - count) * sizeof(uint32_t);
    if (lane_in_quad == 0 && row < out.tokens) {
      words[0] = total;
      if (total >= out.slots) words[1] = slot;
      if (total > 0) atomicAdd(out.row_nnz + row, total);
    }
    return total < out.slots ? nullptr : out.spill + int64_t{slot} * 128 + lane_in_quad;
  }

  // Appends (column, value) if the value, a bf16 in the upper half, is not zero. Predicated, not
  // branched: divergence would cost more than the few instructions it skips.
  __device__ __forceinline__ void append(uint32_t value, uint32_t column) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u64 to;\nsetp.ne.b32 p, %1, 0;\n"
        "cvt.u64.u32 to, %0;\nadd.u64 to, to, %3;\n"
        "@p st.global.b32 [to], %2;\n"
        "@p add.u32 %0, %0, 4;\n}\n"
        : "+r"(at)
        : "r"(value), "r"(value + column), "l"(words)
        : "memory");
  }

  // A pair whose first column mod 65536 is `column`. Rows past the last token have no non-zeros,
  // since the copy engine reads them as zeros.
  __device__ __forceinline__ void store(uint32_t pair, uint32_t column) {
    append(pair << 16, column);
    append(pair & 0xffff0000u, column + 1);
  }
};

// A row that does not fit goes to `spill` whole, zeros too; none of it is then left to be packed.
__device__ __forceinline__ void spill_row(uint32_t (&pairs)[32], uint32_t* spill) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (spill != nullptr) spill[4 * i] = pairs[i];
    pairs[i] = spill != nullptr ? 0 : pairs[i];
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

  // To be packed, 64 rows from first_row on and 256 columns, in up to 17 steps, each short enough
  // to hide behind one k-step of the next tile: counting, then a step per group that is not all
  // zeros.
  __device__ __forceinline__ void begin(int first_row, int tile_index) {
    row_ = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    tile_ = tile_index;
    counted_ = false;
    groups_ = kAllGroups;
  }
  __device__ __forceinline__ bool done() const { return groups_ == 0; }
  // Runs the next step; nothing once all are done.
  __device__ __forceinline__ void advance(const PackTarget& out) {
    if (groups_ == 0) return;
    if (!counted_) {
      count(out);
      counted_ = true;
    } else {
      const int group = __ffs(groups_) - 1;
      groups_ &= groups_ - 1;
      switch (group) {
        case 0:
          store<0>();
          break;
        case 1:
          store<2>();
          break;
        case 2:
          store<4>();
          break;
        case 3:
          store<6>();
          break;
        case 4:
          store<8>();
          break;
        case 5:
          store<10>();
          break;
        case 6:
          store<12>();
          break;
        case 7:
          store<14>();
          break;
        case 8:
          store<16>();
          break;
        case 9:
          store<18>();
          break;
        case 10:
          store<20>();
          break;
        case 11:
          store<22>();
          break;
        case 12:
          store<24>();
          break;
        case 13:
          store<26>();
          break;
        case 14:
          store<28>();
          break;
        case 15:
          store<30>();
          break;
        default:
          break;
      }
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
  // Rows' counts and places, what does not fit, and which groups there is something in.
  __device__ __forceinline__ void count(const PackTarget& out) {
    uint32_t* upper_spill = upper_cursor_.begin(upper_, out, row_, tile_);
    uint32_t* lower_spill = lower_cursor_.begin(lower_, out, row_ + 8, tile_);
    if (__any_sync(~0u, upper_spill != nullptr || lower_spill != nullptr)) {
      spill_row(upper_, upper_spill);
      spill_row(lower_, lower_spill);
    }
    uint32_t groups = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const bool any = (upper_[i] | upper_[i + 1] | lower_[i] | lower_[i + 1]) != 0;
      groups |= any ? 1u << i / 2 : 0;
    }
    groups_ = __reduce_or_sync(~0u, groups);
  }

  // Pairs First and First + 1 of both rows.
  template <int First>
  __device__ __forceinline__ void store() {
    const uint32_t pairs[4] = {opaque(upper_[First]), opaque(upper_[First + 1]),
                               opaque(lower_[First]), opaque(lower_[First + 1])};
    const uint32_t column = opaque((tile_ * kTileN + 2 * (threadIdx.x % 4)) & 0xffff) + 8 * First;
    upper_cursor_.store(pairs[0], column);
    upper_cursor_.store(pairs[1], column + 8);
    lower_cursor_.store(pairs[2], column);
    lower_cursor_.store(pairs[3], column + 8);
  }

  uint32_t upper_[32];  // row_
  uint32_t lower_[32];  // row_ + 8
  RowCursor upper_cursor_, lower_cursor_;
  int row_;
  int tile_;
  bool counted_;
  uint32_t groups_ = 0;  // still to be stored, the same in all lanes
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
