// SPDX-License-Identifier: Apache-2.0
// The product that all kernels of layer_ops.h but `down` share: 16 rows of a weight at a time,
// eight "low" and eight "high" ones, times up to 8 tokens on mma.sync, weights as the 16-row
// operand. What is low and high is the finish's choice, which gets both sums of a pair together: a
// column and the eighth one after it, the two halves of a rotation, a neuron's gate and up.
//
// Two CTAs per multiprocessor, each busy while the other waits, take every so many-th group of 16
// rows. A CTA's eight warps cut the width; their partial sums are added in a fixed order. Weights
// stream through a ring of shared memory in 16-byte pieces, into slots that each thread fills and
// reads by itself: there is nothing to wait for but a thread's own copies, and the ring never runs
// dry between groups. Both rings take less than half of the shared memory, so that the next kernel
// can fill its own while this one finishes.
//
// A product's sum does not depend on the order of its terms, so the eight values of a piece stand
// for whichever k the instruction thinks they are, the same ones in both operands.
#pragma once

#include <algorithm>

#include "twell/ops/decode/layer_ops.h"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::layer_ops {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kPairs = 8;             // of a low and a high row, per group
inline constexpr int kGroup = 2 * kPairs;    // rows
inline constexpr int kBlock = 32;            // values of a row that four lanes read at a time
inline constexpr int kDepth = 5;             // blocks of a warp in flight
inline constexpr int kResident = 2;          // CTAs per multiprocessor
inline constexpr int kSlot = kThreads * 16;  // bytes between a thread's pieces in the ring
inline constexpr int kRingBytes = kDepth * 2 * kSlot;

// Bytes between the tokens of x in shared memory: 64 more than a multiple of 128, so that lanes of
// different tokens read different banks.
__host__ __device__ inline int x_pitch(int64_t width) {
  return static_cast<int>((width * 2 + 127) / 128 * 128 + 64);
}
inline int64_t shared_bytes(const Input& input) {
  return kRingBytes + input.tokens * x_pitch(input.width);
}

struct Shared {
  float partial[2][kWarps][kGroup][kMaxTokens + 1];  // two groups; padded against bank conflicts
  float squares[kWarps][kMaxTokens];
};

// A low and a high sum of one token and pair.
struct Sums {
  int pair, token;  // token may be past the last one
  float low, high;
};

// Rows of a pair; null where there is none.
struct Rows {
  const __nv_bfloat16 *low, *high;
};

// Brings n(x) into shared memory, zeros up to a whole block. Every thread of the CTA calls it.
__device__ __forceinline__ void stage_x(const Input& input, Shared& shared, uint8_t* x_shared) {
  const int thread = static_cast<int>(threadIdx.x), tokens = static_cast<int>(input.tokens);
  const int pieces = static_cast<int>(input.width) / 8;
  const int padded = (pieces + 3) / 4 * 4, pitch = x_pitch(input.width);
  const auto* x = reinterpret_cast<const uint4*>(input.x);
  // The first pieces of all tokens stay in registers between the two passes.
  uint4 kept[kMaxTokens];
#pragma unroll
  for (int m = 0; m < kMaxTokens; ++m) {
    kept[m] = uint4{};
    if (m < tokens && thread < pieces) kept[m] = x[m * pieces + thread];
  }
  float inverse[kMaxTokens];
  if (input.norm != nullptr) {
#pragma unroll
    for (int m = 0; m < kMaxTokens; ++m) {
      if (m >= tokens) break;
      float squares = sm90::sum_of_squares(kept[m]);
      for (int at = thread + kThreads; at < pieces; at += kThreads) {
        squares += sm90::sum_of_squares(x[m * pieces + at]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
      if (thread % 32 == 0) shared.squares[thread / 32][m] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kMaxTokens; ++m) {
      if (m >= tokens) break;
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += shared.squares[warp][m];
      inverse[m] = rsqrtf(total / static_cast<float>(input.width) + input.eps);
    }
  }
  for (int at = thread; at < padded; at += kThreads) {
    uint4 norm{};
    if (input.norm != nullptr && at < pieces) {
      norm = __ldg(reinterpret_cast<const uint4*>(input.norm) + at);
    }
#pragma unroll
    for (int m = 0; m < kMaxTokens; ++m) {
      if (m >= tokens) break;
      uint4 v = kept[m];
      if (at >= kThreads) v = at < pieces ? x[m * pieces + at] : uint4{};
      if (input.norm != nullptr) {
        v = {sm90::scaled(v.x, norm.x, inverse[m]), sm90::scaled(v.y, norm.y, inverse[m]),
             sm90::scaled(v.z, norm.z, inverse[m]), sm90::scaled(v.w, norm.w, inverse[m])};
      }
      *reinterpret_cast<uint4*>(x_shared + m * pitch + at * 16) = v;
    }
  }
  __syncthreads();
}

// This thread's part of the products of a CTA.
class Product {
 public:
  __device__ __forceinline__ Product(const Input& input, Shared& shared, uint8_t* memory)
      : input_(input),
        shared_(shared),
        x_shared_(memory + kRingBytes),
        slots_(sm90::smem_address(memory) + static_cast<uint32_t>(threadIdx.x) * 16) {
    const int width = static_cast<int>(input.width), lane = static_cast<int>(threadIdx.x) % 32;
    const int blocks = (width + kBlock - 1) / kBlock, share = (blocks + kWarps - 1) / kWarps;
    begin_ = min(static_cast<int>(threadIdx.x) / 32 * share, blocks);
    end_ = min(begin_ + share, blocks);
    at_ = lane % 4 * 8;
    lane_end_ = min(end_, (width - at_ + kBlock - 1) / kBlock);
    const int token = lane / 4;
    x_ = token < input.tokens
             ? sm90::smem_address(x_shared_) + token * x_pitch(width) + lane % 4 * 16
             : 0;
  }

  // Runs all of a CTA's groups: rows(group, pair) says what they multiply, finish(group, sums) is
  // called by the first 64 threads, once for each pair and token.
  template <typename GroupRows, typename Finish>
  __device__ __forceinline__ void run(int groups, const GroupRows& rows, const Finish& finish) {
    const int pair = static_cast<int>(threadIdx.x) % 32 / 4, first = static_cast<int>(blockIdx.x),
              step = static_cast<int>(gridDim.x);
    int load_group = first, load_block = begin_;
    Rows load_rows = rows(first, pair);
    const auto load = [&](int slot) {
      if (load_group < groups && begin_ < end_) {
        copy(load_rows, load_block, slot);
        if (++load_block == end_) {
          load_block = begin_;
          load_group += step;
          if (load_group < groups) load_rows = rows(load_group, pair);
        }
      }
      sm90::gathers_commit();  // one group of copies per slot, also an empty one
    };
    sm90::allow_next_kernel();
    if (!input_.constant_weights) sm90::wait_for_previous_kernel();
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) load(slot);
    if (input_.constant_weights) sm90::wait_for_previous_kernel();
    stage_x(input_, shared_, x_shared_);
    int slot = 0;
    for (int group = first; group < groups; group += step) {
      float acc[2][4] = {};
      for (int block = begin_; block < end_; ++block) {
        sm90::gathers_wait<kDepth - 1>();
        const uint32_t from = slots_ + slot * (2 * kSlot);
        multiply(acc, sm90::load_shared16(from), sm90::load_shared16(from + kSlot), block);
        load(slot);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
      }
      const Sums sums = add_up(acc);
      if (sums.token < kMaxTokens) finish(group, sums);
    }
    sm90::gathers_wait<0>();
  }

 private:
  __device__ __forceinline__ void copy(const Rows& rows, int block, int slot) const {
    const bool inside = block < lane_end_, low = inside && rows.low != nullptr,
               high = inside && rows.high != nullptr;
    const int k = block * kBlock + at_;
    const uint32_t to = slots_ + slot * (2 * kSlot);
    // What is not valid is not read, but has to be an address.
    sm90::gather16(to, low ? rows.low + k : input_.x, low);
    sm90::gather16(to + kSlot, high ? rows.high + k : input_.x, high);
  }

  __device__ __forceinline__ void multiply(float (&acc)[2][4], const uint4& low, const uint4& high,
                                           int block) const {
    uint4 x{};
    if (x_ != 0) x = sm90::load_shared16(x_ + block * (kBlock * 2));
    sm90::mma_16x8x16(acc[0], low.x, high.x, low.y, high.y, x.x, x.y);
    sm90::mma_16x8x16(acc[1], low.z, high.z, low.w, high.w, x.z, x.w);
  }

  // Of all warps; what the first 64 threads are to finish. Every thread calls it.
  __device__ __forceinline__ Sums add_up(const float (&acc)[2][4]) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    auto& partial = shared_.partial[parity_];
    parity_ ^= 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[thread / 32][lane / 4 + i / 2 * kPairs][lane % 4 * 2 + i % 2] = acc[0][i] + acc[1][i];
    }
    __syncthreads();  // and none before the next but one use of this half
    Sums sums{thread % kPairs, thread / kPairs, 0.0f, 0.0f};
    if (sums.token >= kMaxTokens) return sums;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      sums.low += partial[from][sums.pair][sums.token];
      sums.high += partial[from][sums.pair + kPairs][sums.token];
    }
    return sums;
  }

  const Input& input_;
  Shared& shared_;
  uint8_t* x_shared_;
  uint32_t slots_;   // of this thread
  uint32_t x_;       // this lane's token in shared memory, 0: past the tokens
  int begin_, end_;  // this warp's blocks of the width
  int lane_end_;     // of those that reach this lane: the last one may be short
  int at_;           // this lane's first value of a block
  int parity_ = 0;
};

// As many CTAs as are resident together, or as there are groups; more where a CTA takes at most
// `most_groups` of them.
template <typename Problem>
cudaError_t launch_product(void (*kernel)(Problem), int groups, int most_groups,
                           const Problem& problem, cudaStream_t stream) {
  const Input& input = problem.input;
  if (input.tokens < 1 || input.tokens > kMaxTokens || input.width <= 0 || input.width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  const auto shared = static_cast<int>(shared_bytes(input));
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  }
  if (status != cudaSuccess) return status;
  const int ctas = std::max(std::min(groups, kResident * multiprocessors),
                            (groups + most_groups - 1) / most_groups);
  return sm90::launch_dependent(kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                                static_cast<uint32_t>(shared), stream, problem);
}

}  // namespace twell::layer_ops
