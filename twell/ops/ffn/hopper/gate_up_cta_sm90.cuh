// SPDX-License-Identifier: Apache-2.0
// What a CTA of the gate kernel has for both of its products (few_token_gate_up_sm90.cu): shared
// memory, barriers, its place in the cluster, its slice of x.
#pragma once

#include "twell/ops/ffn/hopper/few_token_kernels.h"
#include "twell/ops/ffn/hopper/fired_words_sm90.cuh"
#include "twell/ops/ffn/hopper/split_exchange_sm90.cuh"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"
#include "twell/sm90/wgmma.cuh"

namespace twell::few_token::gate_up {

using namespace sm90;

constexpr int kChunk = 64;                // values of k per stage
constexpr int kRowBytes = kChunk * 2;     // of a stage
constexpr int kBlocks = kMaxNeurons / 8;  // of neurons
constexpr int kHalf = kMaxNeurons / 2;    // neurons of a stage of the gate's ring
constexpr int kGateStage = kHalf * kRowBytes;
constexpr int kGateStages = 6;
constexpr int kRing = 80 * 1024;
constexpr int kXChunks = 8;                        // of a CTA's slice that are there at once
constexpr int kFewRows = 80;                       // gathered at once
constexpr int kApart = 64 * kRowBytes * kXChunks;  // bytes of 64 of them; sums behind
constexpr int kXChunk = kSplitTokens * kRowBytes;  // bytes
constexpr int kBarriers = 8;                       // stages that can be told apart
constexpr int kGatePitch = (kMaxNeurons + 8) * 2;  // bytes, of a token
constexpr int kWords = kMaxNeurons / 32;
constexpr int kGatherers = 128;
static_assert(kGateStages * kGateStage <= kRing && kGateStages <= kBarriers);
static_assert(kSentBytes<kMaxNeurons> <= kRing && 4 * kGateStage <= kRing);
static_assert(kFewRows * kRowBytes * kXChunks <= kRing && kSentBytes<kFewRows> <= kRing);
static_assert(kApart + kSentBytes<64> <= kRing);

constexpr int kThreads = 128 + kGatherers;  // a warpgroup multiplies
constexpr int kWarps = kThreads / 32;
constexpr int kX = kRing;                       // [chunks, 64 tokens, 64]
constexpr int kGate = kX + kXChunks * kXChunk;  // [16 tokens, neurons]
constexpr int kBytes = kGate + 16 * kGatePitch;

struct Barriers {
  uint64_t full[kBarriers], empty[kBarriers];         // of the gate's ring
  uint64_t gathered[kBarriers], released[kBarriers];  // of rows of w_up
  uint64_t x[kXChunks];
  uint64_t room[2];             // for sums of each half of the gate, in all CTAs
  uint64_t gate[2], fired, up;  // sent by the cluster
};

// Bit 2t + i: some token g fires for column 2t + i of a block; ballots of lanes 4g + t, by i.
__device__ __forceinline__ uint32_t columns_fired(uint32_t even, uint32_t odd) {
  uint32_t both = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t v = i == 0 ? even : odd;
    v |= v >> 16;
    v |= v >> 8;
    v = (v | v >> 4) & 0xf;
    v = (v | v << 2) & 0x33;
    both |= ((v | v << 1) & 0x55) << i;
  }
  return both;
}

class Cta {
 public:
  struct Shared {
    Barriers barriers;
    uint32_t own[kWords];                       // neurons that fire for this CTA's tokens
    uint4 fired[kWords];                        // by CTA
    uint16_t list[kMaxNeurons];                 // those that fire at all, ascending
    __align__(16) uint16_t out[kWarps][8][16];  // [neuron, token]
    int nnz;
    int released;  // the kernel in front has ended
  };

  __device__ __forceinline__ Cta(const SplitGateUp& params, Shared& shared, uint8_t* memory)
      : q_(params),
        p_(params.problem),
        shared_(shared),
        ring_(smem_address(memory)),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(static_cast<int>(cluster_rank())),
        k_begin_(rank_ * params.slice_chunks * kChunk),
        chunks_(max(min((p_.width - k_begin_ + kChunk - 1) / kChunk, params.slice_chunks), 0)),
        turn_(chunks_ > 0 ? static_cast<int>(blockIdx.x) / kSplit % chunks_ : 0),
        keep_x_(chunks_ <= kXChunks),
        sends_(multiplies() && warp_ * 16 < p_.tokens) {}

  __device__ __forceinline__ void prepare() {
    const int thread = static_cast<int>(threadIdx.x);
    Barriers& b = shared_.barriers;
    if (warp_ == kProducer) {
      if (lane_ < kBarriers) {
        barrier_init(smem_address(b.full + lane_), 1);
        barrier_init(smem_address(b.empty + lane_), 1);
        barrier_init(smem_address(b.gathered + lane_), kThreads);
        barrier_init(smem_address(b.released + lane_), 1);
        barrier_init(smem_address(b.x + lane_), 1);
      } else if (lane_ == kBarriers) {
        barrier_init(smem_address(b.room), kSplit);
        barrier_init(smem_address(b.room + 1), kSplit);
        barrier_init(smem_address(b.gate), 1);
        barrier_init(smem_address(b.gate + 1), 1);
        barrier_init(smem_address(&b.fired), 1);
        barrier_init(smem_address(&b.up), 1);
        prefetch_tensor_map(&q_.map_x);
        prefetch_tensor_map(&q_.map_first);
      }
      fence_barrier_init();
      __syncwarp();
    }
    if (thread < kWords) shared_.own[thread] = 0;
    if (thread == 0) {
      shared_.nnz = 0;
      shared_.released = 0;
    }
  }
  // The cluster's barriers are there.
  __device__ __forceinline__ void meet() {
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
  }

  // Adds what fired to the statistics.
  __device__ __forceinline__ void count() {
    if (p_.activity == nullptr) return;
    if (lane_ == 0 && nnz_ > 0) atomicAdd(&shared_.nnz, nnz_);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (shared_.nnz > 0) {
      atomicAdd(&p_.activity->nnz, static_cast<unsigned long long>(shared_.nnz));
    }
    if (blockIdx.x == 0) {
      atomicAdd(&p_.activity->tokens, static_cast<unsigned long long>(p_.tokens));
    }
  }

 protected:
  static constexpr int kProducer = 4;  // warp

  __device__ __forceinline__ bool multiplies() const { return warp_ < kProducer; }
  // Whether there are tokens that this CTA adds up.
  __device__ __forceinline__ bool adds() const { return p_.tokens > rank_ * 16; }
  __device__ __forceinline__ uint32_t x_place(int index) const {
    return ring_ + kX + index % kXChunks * kXChunk;
  }
  __device__ __forceinline__ uint32_t barrier(const uint64_t* of, int index) const {
    return smem_address(of) + index % kBarriers * 8;
  }
  // Chunks are taken from another one on in each cluster, so that not all read the same of x at
  // one time.
  __device__ __forceinline__ int chunk_k(int c) const {
    int at = c + turn_;
    if (at >= chunks_) at -= chunks_;
    return k_begin_ + at * kChunk;
  }
  static __device__ __forceinline__ uint32_t phase(int index) { return index / kBarriers & 1; }

  __device__ __forceinline__ uint32_t gate_place(int token) const {
    return ring_ + kGate + token * kGatePitch;
  }

  // Kept by warp 0, for the warp that loads.
  __device__ __forceinline__ void set_released() {
    if (lane_ == 0) *static_cast<volatile int*>(&shared_.released) = 1;
  }
  __device__ __forceinline__ bool is_released() const {
    return *static_cast<volatile int*>(&shared_.released) != 0;
  }

  // A warp. The slots of x that are filled are free: their last use lies kXChunks chunks back.
  __device__ __forceinline__ void load_x(int c) {
    if (!elect_one()) return;
    const uint32_t full = barrier(shared_.barriers.x, x_step_ + c);
    barrier_arrive_expect(full, kXChunk);
    tensor_load(x_place(x_step_ + c), &q_.map_x, chunk_k(c), 0, full);
  }

  const SplitGateUp& q_;
  const GateUp& p_;
  Shared& shared_;
  const uint32_t ring_;
  const int warp_, lane_, rank_, k_begin_, chunks_;
  const int turn_;
  const bool keep_x_;  // all of the slice is there at once
  const bool sends_;
  int first_ = 0;               // neuron of this pass
  int total_ = 0;               // neurons of it that fire
  int step_ = 0, up_step_ = 0;  // stages of the rings before this pass
  int x_step_ = 0;              // chunks of x before this product; 0 where they stay
  int nnz_ = 0;
  int begun_ = 0;  // stages of the first pass that have been asked for
  uint32_t gate_phase_ = 0, fired_phase_ = 0, up_phase_ = 0;
  bool first_pass_ = true;
};

}  // namespace twell::few_token::gate_up
