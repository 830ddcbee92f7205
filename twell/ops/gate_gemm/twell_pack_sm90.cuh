// SPDX-License-Identifier: Apache-2.0
// Packing one WGMMA accumulator tile, 64 tokens by 256 neurons per warpgroup, into TwELL.
// The 256 columns of a row are spread over the 4 lanes of a quad. Lane t of the quad writes its own
// non-zeros in column order after those of lanes 0 .. t-1.
#pragma once

#include "twell/ops/gate_gemm/gate_gemm_sm90.h"

namespace twell::gate_gemm {

// max(0, .) of two f32, rounded to bf16, `low` in the lower half. NaN stays NaN.
__device__ __forceinline__ uint32_t relu_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The same value, opaque to the compiler: what is computed from it stays where it is written, and
// is not hoisted out of the k-loop into registers that the loop cannot spare.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// One row's 64 values of this lane: pair i holds columns 8i + 2t and 8i + 2t + 1.
__device__ __forceinline__ int count_nonzeros(const uint32_t (&pairs)[32]) {
  int count = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      // Halves are at most 0x7fff, so adding 0x7fff sets bit 15 exactly where a half is not zero.
      mask = (mask >> 1) | ((opaque(pairs[half * 16 + i]) + 0x7fff7fffu) & 0x80008000u);
    }
    count += __popc(mask);
  }
  return count;
}

// One row of a tile on its way to memory.
struct RowCursor {
  uint32_t* next;   // where this lane's next non-zero goes
  uint32_t* spill;  // this lane's first pair in the spill slot, null where the row fits

  // Writes the count and finds this lane's place among the quad. Every lane of the warp calls it.
  __device__ __forceinline__ void begin(const uint32_t (&pairs)[32], const PackTarget& out, int row,
                                        int tile) {
    const int lane_in_quad = threadIdx.x % 4;
    const int count = count_nonzeros(pairs);
    int through = count;  // inclusive prefix sum over the quad
    const int one_back = __shfl_up_sync(~0u, through, 1, 4);
    if (lane_in_quad >= 1) through += one_back;
    const int two_back = __shfl_up_sync(~0u, through, 2, 4);
    if (lane_in_quad >= 2) through += two_back;
    const int total = __shfl_sync(~0u, through, 3, 4);
    const uint32_t slot = row * out.tiles + tile;
    uint32_t* words = out.words + int64_t{slot} * out.slots;
    next = words + 1 + through - count;
    spill = total < out.slots ? nullptr : out.spill + int64_t{slot} * 128 + lane_in_quad;
    if (lane_in_quad == 0 && row < out.tokens) {
      words[0] = total;
      if (total >= out.slots) words[1] = slot;
      if (total > 0) atomicAdd(out.row_nnz + row, total);
    }
  }

  // Appends (column, value) if the value, a bf16 in the upper half, is not zero. Predicated, not
  // branched: divergence would cost more than the few instructions it skips.
  __device__ __forceinline__ void append(uint32_t value, uint32_t column) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
        "@p st.global.b32 [%0], %2;\n"
        "@p add.u64 %0, %0, 4;\n}\n"
        : "+l"(next)
        : "r"(value), "r"(value + column)
        : "memory");
  }

  // Pair i, whose first column mod 65536 is `column`. Rows past the last token have no non-zeros,
  // since the copy engine reads them as zeros.
  __device__ __forceinline__ void store(uint32_t pair, int i, uint32_t column) {
    if (__any_sync(~0u, spill != nullptr)) {
      if (spill != nullptr) spill[4 * i] = pair;
    }
    pair = spill != nullptr ? 0 : pair;
    append(pair << 16, column);
    append(pair & 0xffff0000u, column + 1);
  }
};

// The activations of a tile as bf16 pairs, between the end of its GEMM and their packing, which is
// cut into steps short enough to hide behind one k-step of the next tile.
class PackedTile {
 public:
  static constexpr int kSteps = 17;

  __device__ __forceinline__ void take(const float (&acc)[128], int first_row, int tile_index) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      upper_[i] = relu_bf16x2(acc[4 * i], acc[4 * i + 1]);
      lower_[i] = relu_bf16x2(acc[4 * i + 2], acc[4 * i + 3]);
    }
    row_ = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    tile_ = tile_index;
    step_ = 0;
  }

  // Runs the next step; nothing once all are done.
  __device__ __forceinline__ void advance(const PackTarget& out) {
    switch (step_) {
      case 0:
        upper_cursor_.begin(upper_, out, row_, tile_);
        lower_cursor_.begin(lower_, out, row_ + 8, tile_);
        break;
      case 1:
        store<0>();
        break;
      case 2:
        store<2>();
        break;
      case 3:
        store<4>();
        break;
      case 4:
        store<6>();
        break;
      case 5:
        store<8>();
        break;
      case 6:
        store<10>();
        break;
      case 7:
        store<12>();
        break;
      case 8:
        store<14>();
        break;
      case 9:
        store<16>();
        break;
      case 10:
        store<18>();
        break;
      case 11:
        store<20>();
        break;
      case 12:
        store<22>();
        break;
      case 13:
        store<24>();
        break;
      case 14:
        store<26>();
        break;
      case 15:
        store<28>();
        break;
      case 16:
        store<30>();
        break;
      default:
        return;
    }
    ++step_;
  }
  __device__ __forceinline__ bool done() const { return step_ == kSteps; }

 private:
  // Pairs First and First + 1 of both rows.
  template <int First>
  __device__ __forceinline__ void store() {
    const uint32_t pairs[4] = {opaque(upper_[First]), opaque(upper_[First + 1]),
                               opaque(lower_[First]), opaque(lower_[First + 1])};
    // A spilled row writes its zeros too.
    const bool spills = upper_cursor_.spill != nullptr || lower_cursor_.spill != nullptr;
    if (!__any_sync(~0u, (pairs[0] | pairs[1] | pairs[2] | pairs[3]) != 0 || spills)) return;
    const uint32_t column = opaque((tile_ * 256 + 2 * (threadIdx.x % 4)) & 0xffff) + 8 * First;
    upper_cursor_.store(pairs[0], First, column);
    upper_cursor_.store(pairs[1], First + 1, column + 8);
    lower_cursor_.store(pairs[2], First, column);
    lower_cursor_.store(pairs[3], First + 1, column + 8);
  }

  uint32_t upper_[32];  // row_
  uint32_t lower_[32];  // row_ + 8
  RowCursor upper_cursor_, lower_cursor_;
  int row_;
  int tile_;
  int step_ = kSteps;
};

}  // namespace twell::gate_gemm
