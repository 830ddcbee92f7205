// SPDX-License-Identifier: Apache-2.0
// The gate of a cluster's neurons: the first weight through the copy engine, partial sums to the
// CTA that has their tokens, and the list of neurons that fire for one of the cluster's tokens.
#pragma once

#include "twell/ops/few_token_ffn/gate_up_cta_sm90.cuh"

namespace twell::few_token::gate_up {

template <int Tiles>
class Gate : public Cta<Tiles> {
  using L = Layout<Tiles>;
  using Base = Cta<Tiles>;

 public:
  using Base::Base;

  __device__ __forceinline__ void gate() {
    float acc[2][kHalf / 2];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) acc[i % 2][i / 2] = 0.0f;
    if (multiplies()) multiply_first(acc);
    if (warp_ == kProducer) produce();
    __syncwarp();
    step_ += 2 * chunks_;
    if (!keep_x_) x_step_ += chunks_;
    constexpr int kSent = kSentBytes<kMaxNeurons>, kAtOnce = Tiles * kSent <= kRing ? Tiles : 1;
#pragma unroll 1
    for (int tile = 0; tile < Tiles; tile += kAtOnce) {
      const int own = own_tiles(tile, kAtOnce);
      cluster_arrive_relaxed();
      cluster_wait();  // nobody needs its ring any more
      const uint32_t sent = smem_address(&shared_.barriers.gate);
      if (threadIdx.x == 0) barrier_arrive_expect(sent, own * kSent);
      if (sends_ && warp_ / 4 >= tile && warp_ / 4 < tile + kAtOnce) {
        const uint32_t place = ring_ + (warp_ / 4 - tile) * kSent;
        send_sums<kHalf>(acc[0], place, sent, rank_, warp_ % 4);
        send_sums<kHalf>(acc[1], place + kSent / 2, sent, rank_, warp_ % 4);
      }
      barrier_wait(sent, gate_phase_);
      gate_phase_ ^= 1;
#pragma unroll 1
      for (int i = 0; i < own; ++i) {
        constexpr int kMost = (kBlocks + L::kWarps - 1) / L::kWarps;
        const int blocks = q_.neurons / 8;
        float4 sums[kMost];
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
          const int b = min(warp_ + j * L::kWarps, blocks - 1), half = b >= blocks / 2;
          sums[j] = add_sums(ring_ + i * kSent + half * (kSent / 2), b - half * (blocks / 2),
                             kSent / 2 / kSplit);
        }
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
          const int b = warp_ + j * L::kWarps;
          if (b < blocks) finish_gate(tile + i, b, sums[j]);
        }
      }
    }
  }

  // Tells the next kernel which neurons fire. For the warps that do not multiply.
  __device__ __forceinline__ void publish() const {
    const int word = static_cast<int>(threadIdx.x) - Tiles * 128;
    if (rank_ != 0 || word < 0 || word * 32 >= min(q_.neurons, p_.ffn - first_)) return;
    const uint4 by_cta = shared_.fired[word];
    store_fired(p_.hidden.fired + first_ / 32 + word, by_cta.x | by_cta.y | by_cta.z | by_cta.w,
                q_.announced);
  }

  // Tells the cluster which neurons fire, and lists those that do for one of its tokens.
  __device__ __forceinline__ void list() {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t sent = smem_address(&shared_.barriers.fired);
    if (thread == 0) barrier_arrive_expect(sent, kSplit * kWords * 4);
    __syncthreads();
    if (thread < kSplit * kWords) {
      const int to = thread / kWords, word = thread % kWords;
      uint32_t mine = shared_.own[0][word];
      if constexpr (Tiles > 1) mine |= shared_.own[1][word];
      store_remote4(remote_address(smem_address(&shared_.fired[word]) + rank_ * 4, to), mine,
                    remote_address(sent, to));
    }
    if (p_.up != nullptr && warp_ < kWords) {
      const uint32_t mine = shared_.own[0][warp_];
      if (__popc(mine) <= 12 && (mine >> lane_ & 1) != 0) {
        bulk_prefetch(p_.up + int64_t{first_ + thread} * p_.width, p_.width * 2);
      }
    }
    barrier_wait(sent, fired_phase_);
    fired_phase_ ^= 1;
    int before = 0;
    uint32_t mine = 0;
    total_ = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint4 by_cta = shared_.fired[word];
      const uint32_t bits = by_cta.x | by_cta.y | by_cta.z | by_cta.w;
      if (word == warp_) {
        mine = bits;
        before = total_;
      }
      total_ += __popc(bits);
    }
    if (mine >> lane_ & 1) {
      shared_.list[before + __popc(mine & ((1u << lane_) - 1))] = static_cast<uint16_t>(thread);
    }
    __syncthreads();
  }

 private:
  using Base::barrier;
  using Base::chunk_k;
  using Base::chunks_;
  using Base::fired_phase_;
  using Base::first_;
  using Base::first_pass_;
  using Base::gate_phase_;
  using Base::gate_place;
  using Base::keep_x_;
  using Base::kProducer;
  using Base::lane_;
  using Base::load_x;
  using Base::multiplies;
  using Base::nnz_;
  using Base::own_tiles;
  using Base::p_;
  using Base::phase;
  using Base::q_;
  using Base::rank_;
  using Base::ring_;
  using Base::sends_;
  using Base::shared_;
  using Base::step_;
  using Base::total_;
  using Base::warp_;
  using Base::x_place;
  using Base::x_step_;
  // halves[i] += x times that half of the pass's neurons.
  __device__ __forceinline__ void multiply_first(float (&halves)[2][kHalf / 2]) {
    int stage = 0, step = step_;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      const uint64_t a = k_major_operand(x_place(x_index, warp_ / 4));
#pragma unroll
      for (int half = 0; half < 2; ++half, ++step) {
        barrier_wait(barrier(shared_.barriers.full, step), phase(step));
        const uint64_t b = k_major_operand(ring_ + stage * kGateStage);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<kHalf, false>(halves[half], a + k * 2, b + k * 2, true);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > step_) release(step - 1);
        stage = stage + 1 == kGateStages ? 0 : stage + 1;
      }
    }
    wgmma_wait<0>();
    if (chunks_ > 0) release(step - 1);
  }
  __device__ __forceinline__ void release(int step) {
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier(shared_.barriers.empty, step));
  }

  __device__ __forceinline__ void load_first(int i, int stage) {
    const int rows = q_.neurons / 2;
    if (!elect_one()) return;
    const uint32_t full = barrier(shared_.barriers.full, step_ + i);
    barrier_arrive_expect(full, rows * kRowBytes);
    tensor_load(ring_ + stage * kGateStage, &q_.map_first, chunk_k(i / 2), first_ + i % 2 * rows,
                full);
  }
  __device__ __forceinline__ void produce() {
    const bool early = first_pass_ && p_.early_weights;
    if (first_pass_ && !early) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < min(2 * chunks_, kGateStages); ++i) {
      // What the kernel in front asks for would wait behind more.
      if (early && i >= q_.on_their_way) {
        const uint32_t before = barrier(shared_.barriers.full, i - q_.on_their_way);
        while (!barrier_done(before, 0) && !this->is_released()) {
        }
      }
      load_first(i, i);
    }
    if (early) wait_for_previous_kernel();
    if (first_pass_ || !keep_x_) {
#pragma unroll 1
      for (int c = 0; c < min(chunks_, kXChunks); ++c) load_x(c);
    }
    int stage = 0;
#pragma unroll 1
    for (int i = kGateStages; i < 2 * chunks_; ++i) {
      const int before = step_ + i - kGateStages;
      barrier_wait(barrier(shared_.barriers.empty, before), phase(before));
      load_first(i, stage);
      if (i % 2 == 0 && i / 2 >= kXChunks) load_x(i / 2);
      stage = stage + 1 == kGateStages ? 0 : stage + 1;
    }
  }

  __device__ __forceinline__ void finish_gate(int tile, int block, const float4& sum) {
    const int token = tile * kTile + rank_ * 16 + lane_ / 4;
    const bool exists = first_ + block * 8 + lane_ % 4 * 2 < p_.ffn;
    const bool low = exists && token < p_.tokens, high = exists && token + 8 < p_.tokens;
    const uint32_t g0 = low ? relu_bf16(sum.x) : 0, g1 = low ? relu_bf16(sum.y) : 0;
    const uint32_t g2 = high ? relu_bf16(sum.z) : 0, g3 = high ? relu_bf16(sum.w) : 0;
    const uint32_t at = gate_place(tile, lane_ / 4) + block * 16 + lane_ % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(g0 | g1 << 16) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * kGatePitch), "r"(g2 | g3 << 16)
                 : "memory");
    const uint32_t b0 = __ballot_sync(~0u, g0 != 0), b1 = __ballot_sync(~0u, g1 != 0);
    const uint32_t b2 = __ballot_sync(~0u, g2 != 0), b3 = __ballot_sync(~0u, g3 != 0);
    nnz_ += __popc(b0) + __popc(b1) + __popc(b2) + __popc(b3);
    if (lane_ == 0) {
      reinterpret_cast<uint8_t*>(shared_.own[tile])[block] =
          static_cast<uint8_t>(columns_fired(b0 | b2, b1 | b3));
    }
  }
};

}  // namespace twell::few_token::gate_up
