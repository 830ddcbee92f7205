// SPDX-License-Identifier: Apache-2.0
// y = h w_down over the neurons that fired, for up to 8 tokens. A CTA makes 16 columns of y, so it
// reads 32 bytes of each such neuron's row; the gate kernel has asked for the whole rows. Its eight
// warps have an eighth of the neurons each and need not meet before the end: a warp lists those of
// its own that fired, takes 16 of them at a time through a ring of its own, and multiplies on
// mma.sync with columns as the 16-row operand and tokens as the 8-column one. The eight partial
// results are added in a fixed order. What fires is known before h is, so that weights are there
// when the kernel in front ends.
#include "twell/ops/ffn/hopper/few_token_kernels.h"
#include "twell/ops/ffn/hopper/fired_words_sm90.cuh"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::few_token {

using namespace sm90;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 16;
constexpr int kGroup = 16;  // neurons that a warp multiplies at a time
constexpr int kStages = 4;
constexpr int kWeightStage = kGroup * kColumns * 2;
constexpr int kStage = kWeightStage + kGroup * kRowTokens * 2;
constexpr int kWords = 20;  // of neurons that a warp lists at a time

// Partial results in f32, [tokens, columns]; rows are padded against bank conflicts.
constexpr int kPartialPitch = kColumns * 4 + 16;
static_assert(kRowTokens * kPartialPitch <= kStages * kStage);

struct Shared {
  uint8_t ring[kWarps][kStages * kStage];  // then partial results
  uint16_t list[kWarps][kWords * kMaxRows];
};

// 16-byte piece of a row of Pieces in shared memory, swizzled for ldmatrix.
template <int Pieces>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return (row * Pieces + (piece ^ (row % 8 / (8 / Pieces)))) * 16;
}

class Kernel {
 public:
  __device__ __forceinline__ Kernel(const Down& problem, Shared& shared)
      : p_(problem),
        shared_(shared),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        column_(static_cast<int>(blockIdx.x) * kColumns),
        ring_(smem_address(shared.ring[warp_])) {}

  __device__ __forceinline__ void run() {
    allow_next_kernel();
    const int words = (p_.ffn + p_.word_neurons - 1) / p_.word_neurons;
    const int share = (words + kWarps - 1) / kWarps, begin = min(warp_ * share, words),
              end = min(begin + share, words);
    const bool listed = list_early(begin, min(end - begin, kWords));
    // All words, where each warp has listed all of its own.
    const bool read = share <= kWords && __syncthreads_and(listed) != 0;
    bool last = false;
    if (read && threadIdx.x == 0) last = last_to_read(p_.hidden.arrived);
    wait_for_previous_kernel();
    // Four columns of a token are a thread's at the end.
    const int token = static_cast<int>(threadIdx.x) / 4,
              column = column_ + static_cast<int>(threadIdx.x) % 4 * 4;
    const bool stores = token < p_.tokens && column < p_.width;
    const int64_t at = int64_t{token} * p_.width + column;
    uint2 residual{};
    if (p_.residual != nullptr && stores) {
      residual = *reinterpret_cast<const uint2*>(p_.residual + at);
    }
    float acc[4] = {};
    for (int word = begin; word < end; word += kWords) {
      const bool begun = listed && word == begin;
      if (!begun) {
        list(lane_ < min(end - word, kWords) ? load_fired(p_.hidden.fired + word + lane_) : 0);
      }
      multiply(acc, word * p_.word_neurons, begun);
    }
    leave(acc);
    __syncthreads();
    if (!read && threadIdx.x == 0) last = last_to_read(p_.hidden.arrived);
    if (stores) store(at, add_up(token, column), residual);
    if (warp_ == 0) clear_if_last(last, p_.hidden.fired, words);
  }

 private:
  // Before the kernel in front has ended: what fires of some words, and the first weights. False:
  // not known yet.
  __device__ __forceinline__ bool list_early(int word, int words) {
    uint64_t bits = kFiredKnown;
    if (lane_ < words) bits = await_fired<true>(p_.hidden.fired + word + lane_);
    if (__all_sync(~0u, is_known(bits)) == 0) return false;
    list(bits);
#pragma unroll
    for (int i = 0; i < kStages; ++i) gather_weights(word * p_.word_neurons, i * kGroup, i);
    return true;
  }
  // The neurons of each lane's word that fired, ascending.
  __device__ __forceinline__ void list(uint64_t bits) {
    bits &= ~kFiredKnown;
    int at = __popcll(bits);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, at, step);
      if (lane_ >= step) at += other;
    }
    count_ = __shfl_sync(~0u, at, 31);
    at -= __popcll(bits);
    for (; bits != 0; bits &= bits - 1) {
      shared_.list[warp_][at++] =
          static_cast<uint16_t>(lane_ * p_.word_neurons + __ffsll(static_cast<int64_t>(bits)) - 1);
    }
    __syncwarp();
  }

  // A stage gets neurons first .. first + 15 of the list, zeros past its end: their 16 columns,
  __device__ __forceinline__ void gather_weights(int base, int first, int stage) const {
    if (first >= count_) return;
    const int row = lane_ / 2, piece = lane_ % 2, at = column_ + piece * 8;
    const bool inside = first + row < count_ && at < p_.width;
    const __nv_bfloat16* from = p_.weight;
    if (inside) from += int64_t{base + shared_.list[warp_][first + row]} * p_.width + at;
    gather16(ring_ + stage * kStage + swizzled<2>(row, piece), from, inside);
  }
  // and their h.
  __device__ __forceinline__ void gather_hidden(int base, int first, int stage) const {
    if (first >= count_ || lane_ >= kGroup) return;
    const bool valid = first + lane_ < count_;
    const __nv_bfloat16* from = p_.hidden.h;
    if (valid) from += int64_t{base + shared_.list[warp_][first + lane_]} * kRowTokens;
    gather16(ring_ + stage * kStage + kWeightStage + swizzled<1>(lane_, 0), from, valid);
  }

  // acc += of the listed neurons, `base` on; begun: the first weights have been asked for.
  __device__ __forceinline__ void multiply(float (&acc)[4], int base, bool begun) {
    const auto fill = [&](int first, int stage, bool weights) {
      if (weights) gather_weights(base, first, stage);
      gather_hidden(base, first, stage);
      gathers_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages; ++i) fill(i * kGroup, i, !begun);
    int stage = 0;
    for (int first = 0; first < count_; first += kGroup) {
      gathers_wait<kStages - 1>();
      __syncwarp();
      const uint32_t from = ring_ + stage * kStage;
      uint32_t a[4], b[2];
      load_matrices_transposed(a, from + swizzled<2>(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2));
      load_matrices_transposed(b, from + kWeightStage + swizzled<1>(lane_ % 16, 0));
      mma_16x8x16(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
      __syncwarp();
      fill(first + kStages * kGroup, stage, true);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    gathers_wait<0>();
    __syncwarp();  // the list and the ring may be overwritten
  }

  __device__ __forceinline__ float* partial(int warp, int token, int column) const {
    return reinterpret_cast<float*>(shared_.ring[warp] + token * kPartialPitch + column * 4);
  }
  __device__ __forceinline__ void leave(const float (&acc)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *partial(warp_, lane_ % 4 * 2 + i % 2, lane_ / 4 + i / 2 * 8) = acc[i];
    }
  }
  __device__ __forceinline__ float4 add_up(int token, int column) const {
    float4 sum{};
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const float4 v = *reinterpret_cast<const float4*>(partial(from, token, column - column_));
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    return sum;
  }
  __device__ __forceinline__ void store(int64_t at, float4 sum, const uint2& residual) const {
    if (p_.residual != nullptr) {
      const float2 low = to_floats(residual.x), high = to_floats(residual.y);
      sum = {sum.x + low.x, sum.y + low.y, sum.z + high.x, sum.w + high.y};
    }
    *reinterpret_cast<uint2*>(p_.y + at) = {bf16x2(sum.x, sum.y), bf16x2(sum.z, sum.w)};
  }

  const Down& p_;
  Shared& shared_;
  const int warp_, lane_, column_;
  const uint32_t ring_;
  int count_ = 0;  // of the list
};

// 48 registers: room beside the gate kernel's CTAs, so that it waits where it will run.
__global__ void __maxnreg__(48) row_down_sm90_kernel(const __grid_constant__ Down problem) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  Kernel(problem, *reinterpret_cast<Shared*>(dynamic)).run();
}

}  // namespace

cudaError_t launch_row_down_sm90(const Down& problem, cudaStream_t stream) {
  constexpr int kShared = sizeof(Shared);
  const auto* kernel = reinterpret_cast<const void*>(row_down_sm90_kernel);
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  }
  if (status != cudaSuccess) return status;
  return launch_dependent(row_down_sm90_kernel, dim3((problem.width + kColumns - 1) / kColumns),
                          kThreads, kShared, stream, problem);
}

}  // namespace twell::few_token
