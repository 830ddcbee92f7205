// SPDX-License-Identifier: Apache-2.0
// Rows of the first weight in a CTA's shared memory (few_token_row_gate_up_sm90.cu): one warp
// brings them through the copy engine; where they were, the warps that multiply leave their partial
// sums.
#pragma once

#include "twell/ops/ffn/hopper/row_gate_up_x_sm90.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::few_token::row_gate_up {

constexpr int kGroup = 16;                   // rows of a product
constexpr int kGroups = kMaxRows / kGroup;   // that a CTA keeps
constexpr int kPitch = kSegment * 2 + 64;    // bytes; lanes of two rows read different banks
constexpr int kPart = kBlocks * kBlock * 2;  // bytes of a row that a warp multiplies
constexpr int kQuad = 4;                     // rows that are announced together
constexpr int kQuads = kGroup / kQuad;
constexpr int kOnTheirWay = 4;  // quads, 64 KiB

struct Shared {
  uint64_t full[kGroups][kQuads], empty[kGroups];
  uint16_t gate[kMaxRows][kRowTokens];  // bf16
  uint8_t list[kWarps][kMaxRows];       // rows that fire, each warp's own copy
  uint32_t fired[kMaxRows / kGroup];    // a byte per four rows
  float squares[kWarps][kRowTokens];
  int nnz;
};

class Rows {
 public:
  __device__ __forceinline__ Rows(const RowGateUp& problem, Shared& shared, uint8_t* memory)
      : p_(problem),
        shared_(shared),
        ring_(smem_address(memory)),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        x_(problem, warp_) {}

 protected:
  // A row group of a segment is an item; its slot is item % kGroups. Quads count on through items.
  __device__ __forceinline__ uint32_t full(int quad) const {
    return smem_address(&shared_.full[quad / kQuads % kGroups][quad % kQuads]);
  }
  __device__ __forceinline__ uint32_t empty(int item) const {
    return smem_address(&shared_.empty[item % kGroups]);
  }
  static __device__ __forceinline__ uint32_t phase(int item) { return item / kGroups & 1; }

  __device__ __forceinline__ void produce() {
    if (!p_.early_weights) wait_for_previous_kernel();
    const int step = static_cast<int>(gridDim.x) * p_.rows;
    int item = 0;
#pragma unroll 1
    for (int first = static_cast<int>(blockIdx.x) * p_.rows; first < p_.ffn; first += step) {
      const int rows = min(p_.rows, p_.ffn - first);
#pragma unroll 1
      for (int segment = 0; segment < x_.segments(); ++segment) {
        const int k = segment * kSegment;
        const __nv_bfloat16* from = p_.first + int64_t{first} * p_.width + k;
#pragma unroll 1
        for (int row = 0; row < rows; row += kGroup, ++item) {
          if (item >= kGroups) barrier_wait(empty(item), phase(item) ^ 1);
#pragma unroll 1
          for (int i = 0; i < kQuads; ++i) {
            load_quad(from, row + i * kQuad, rows, min(p_.width - k, kSegment) * 2,
                      item * kQuads + i);
          }
        }
      }
    }
  }
  // Also rows that do not exist are announced.
  __device__ __forceinline__ void load_quad(const __nv_bfloat16* from, int row, int rows,
                                            uint32_t bytes, int quad) const {
    const int before = quad - kOnTheirWay, here = max(min(rows - row, kQuad), 0);
    if (before >= 0) barrier_wait(full(before), phase(before / kQuads));
    if (lane_ == 0) barrier_arrive_expect(full(quad), here * bytes);
    __syncwarp();
    if (lane_ < here) {
      const int place = quad % (kGroups * kQuads) * kQuad + lane_;
      bulk_load(ring_ + place * kPitch, from + int64_t{row + lane_} * p_.width, bytes, full(quad));
    }
  }

  // A warp's partial sums stand in its part of a row: tokens of four neighbouring rows in different
  // banks.
  __device__ __forceinline__ uint32_t sum_place(int place, int token) const {
    return ring_ + place * kPitch + place / 2 % 2 * 32 + token * 4;
  }
  // Of the first `rows` rows of a product, to `place` and on.
  __device__ __forceinline__ void leave_sums(const float (&acc)[4], int place, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_ / 4;
      if (row >= rows) continue;
      const uint32_t to = sum_place(place + row, lane_ % 4 * 2) + warp_ * kPart;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(acc[half * 2]),
                   "f"(acc[half * 2 + 1])
                   : "memory");
    }
  }
  __device__ __forceinline__ float add_sums(int place, int token) const {
    const uint32_t from = sum_place(place, token);
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      float v;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from + warp * kPart) : "memory");
      sum += v;
    }
    return sum;
  }
  __device__ __forceinline__ void multiply(float (&acc)[4], const uint4& low, const uint4& high,
                                           int block) const {
    const uint4& x = x_[block];
    mma_16x8x16(acc, low.x, high.x, low.y, high.y, x.x, x.y);
    mma_16x8x16(acc, low.z, high.z, low.w, high.w, x.z, x.w);
  }

  const RowGateUp& p_;
  Shared& shared_;
  const uint32_t ring_;
  const int warp_, lane_;
  Tokens x_;
};

}  // namespace twell::few_token::row_gate_up
