// SPDX-License-Identifier: Apache-2.0
// x of the gate kernel for up to 8 tokens (few_token_row_gate_up_sm90.cu): warps share out the
// width, a segment at a time where it is wide, and keep theirs in registers as mma.sync wants it,
// normalised if the layer begins with a norm.
#pragma once

#include "twell/ops/ffn/hopper/few_token_kernels.h"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/bf16_pair.cuh"

namespace twell::few_token::row_gate_up {

using namespace sm90;

constexpr int kWarps = 16;  // that multiply; one more loads
constexpr int kMultipliers = 32 * kWarps;
constexpr int kBlock = 32;  // values of a row that four lanes read at a time
constexpr int kBlocks = 4;  // of a warp
constexpr int kSegment = kWarps * kBlocks * kBlock;  // of the width

class Tokens {
 public:
  __device__ __forceinline__ Tokens(const RowGateUp& problem, int warp)
      : p_(problem),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % 32),
        segments_((problem.width + kSegment - 1) / kSegment) {}

  __device__ __forceinline__ int segments() const { return segments_; }
  // This lane's first value of block b of a segment, may be past the width.
  __device__ __forceinline__ int k(int segment, int b) const {
    return segment * kSegment + (warp_ * kBlocks + b) * kBlock + lane_ % 4 * 8;
  }
  // Eight values of token lane / 4, zeros past the tokens and the width.
  __device__ __forceinline__ const uint4& operator[](int b) const { return x_[b]; }

  // Once; all warps that multiply.
  __device__ __forceinline__ void prepare(float (&squares)[kWarps][kRowTokens]) {
    if (segments_ == 1) load(0);
    if (p_.norm == nullptr) return;
    float sum = 0.0f;
    for (int segment = 0; segment < segments_; ++segment) {
      if (segments_ > 1) load(segment);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) sum += sum_of_squares(x_[b]);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane_ % 4 == 0) squares[warp_][lane_ / 4] = sum;
    named_barrier(1, kMultipliers);
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += squares[warp][lane_ / 4];
    inverse_ = rsqrtf(total / static_cast<float>(p_.width) + p_.eps);
    if (segments_ == 1) scale(0);
  }
  // Several segments take turns in registers.
  __device__ __forceinline__ void turn_to(int segment) {
    if (segments_ == 1) return;
    load(segment);
    if (p_.norm != nullptr) scale(segment);
  }

 private:
  __device__ __forceinline__ void load(int segment) {
    const int token = lane_ / 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int at = k(segment, b);
      x_[b] = uint4{};
      if (token < p_.tokens && at < p_.width) {
        x_[b] = *reinterpret_cast<const uint4*>(p_.x + int64_t{token} * p_.width + at);
      }
    }
  }
  __device__ __forceinline__ void scale(int segment) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int at = k(segment, b);
      uint4 norm{};
      if (at < p_.width) norm = __ldg(reinterpret_cast<const uint4*>(p_.norm + at));
      uint4& x = x_[b];
      x = {scaled(x.x, norm.x, inverse_), scaled(x.y, norm.y, inverse_),
           scaled(x.z, norm.z, inverse_), scaled(x.w, norm.w, inverse_)};
    }
  }

  const RowGateUp& p_;
  const int warp_, lane_, segments_;
  uint4 x_[kBlocks];
  float inverse_ = 0.0f;  // of the norm
};

}  // namespace twell::few_token::row_gate_up
