// SPDX-License-Identifier: Apache-2.0
// The gate of a cluster's neurons: partial sums to the CTA that has their tokens, and the list of
// neurons that fire for one of the cluster's tokens.
#pragma once

#include "twell/ops/ffn/hopper/gate_up_first_sm90.cuh"

namespace twell::few_token::gate_up {

class Gate : public First {
 public:
  using First::First;

  // Sums of a half of the neurons travel while the other half's last products are made, to slots of
  // the ring that are free by then. The warps that do not multiply finish the first half.
  __device__ __forceinline__ void gate() {
    static_assert(kHalfSent == 2 * kGateStage);
    const uint32_t sent = smem_address(shared_.barriers.gate);  // and the second half's behind it
    const int blocks = adds() ? q_.neurons / 16 : 0;            // of a half, to add up here
    if (threadIdx.x == 0) {
      barrier_arrive_expect(sent, adds() ? kHalfSent : 0);
      barrier_arrive_expect(sent + 8, adds() ? kHalfSent : 0);
    }
    if (multiplies()) {
      float sums[2][kHalf / 2];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) sums[i % 2][i / 2] = 0.0f;
      const uint64_t* room = shared_.barriers.room;
      multiply_head(sums);
      tell_room(room);  // slots 0 and 1 are free,
      multiply_tail(sums[0], 0);
      wgmma_wait<0>();
      tell_room(room + 1);  // and 2 and 3
      multiply_tail(sums[1], 1);
      barrier_wait(smem_address(room), gate_phase_);
      send_sums<kHalf>(sums[0], ring_, sent, rank_, warp_, sends_);
      wgmma_wait<0>();
      release_tail();
      barrier_wait(smem_address(room + 1), gate_phase_);
      send_sums<kHalf>(sums[1], ring_ + kHalfSent, sent + 8, rank_, warp_, sends_);
    } else if (warp_ == kProducer) {
      produce();
      __syncwarp();
    }
    count_steps();
#pragma unroll 1
    for (int half = multiplies() ? 1 : 0; half < 2; ++half) {
      barrier_wait(sent + half * 8, gate_phase_);
      const int idle = half == 0 ? kProducer : 0;  // warps
#pragma unroll 1
      for (int b = warp_ - idle; b < blocks; b += kWarps - idle) {
        const int block = half * blocks + b;
        const uint32_t fired =
            finish_gate(block, add_sums(ring_ + half * kHalfSent, b, kHalfSent / kSplit));
        if (half == 0 && p_.up != nullptr && __popc(fired) <= 3 && (fired >> lane_ & 1) != 0) {
          ask_for_up(block * 8 + lane_);
        }
      }
    }
    gate_phase_ ^= 1;
  }

  // Tells the next kernel which neurons fire. For the warps that do not multiply.
  __device__ __forceinline__ void publish() const {
    const int word = static_cast<int>(threadIdx.x) - 128;
    if (rank_ != 0 || word < 0 || word * 32 >= min(q_.neurons, p_.ffn - first_)) return;
    const uint4 by_cta = shared_.fired[word];
    store_fired(p_.hidden.fired + first_ / 32 + word, by_cta.x | by_cta.y | by_cta.z | by_cta.w);
  }

  // Tells the cluster which neurons fire, and lists those that do for one of its tokens.
  __device__ __forceinline__ void list() {
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t sent = smem_address(&shared_.barriers.fired);
    if (thread == 0) barrier_arrive_expect(sent, kSplit * kWords * 4);
    __syncthreads();
    if (thread < kSplit * kWords) {
      const int to = thread / kWords, word = thread % kWords;
      store_remote4(remote_address(smem_address(&shared_.fired[word]) + rank_ * 4, to),
                    shared_.own[word], remote_address(sent, to));
    }
    if (p_.up != nullptr && warp_ < kWords && warp_ * 64 >= q_.neurons) {
      const uint32_t mine = shared_.own[warp_];
      if (__popc(mine) <= 12 && (mine >> lane_ & 1) != 0) ask_for_up(thread);
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
  static constexpr int kHalfSent = kSentBytes<kHalf>;

  __device__ __forceinline__ void count_steps() {
    step_ += 2 * chunks_;
    if (!keep_x_) x_step_ += chunks_;
  }

  // A block of 8 neurons and 16 tokens. Which of them fire, by bits; every lane has them.
  __device__ __forceinline__ uint32_t finish_gate(int block, const float4& sum) {
    const int token = rank_ * 16 + lane_ / 4;
    const bool exists = first_ + block * 8 + lane_ % 4 * 2 < p_.ffn;
    const bool low = exists && token < p_.tokens, high = exists && token + 8 < p_.tokens;
    const uint32_t g0 = low ? relu_bf16(sum.x) : 0, g1 = low ? relu_bf16(sum.y) : 0;
    const uint32_t g2 = high ? relu_bf16(sum.z) : 0, g3 = high ? relu_bf16(sum.w) : 0;
    const uint32_t at = gate_place(lane_ / 4) + block * 16 + lane_ % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(g0 | g1 << 16) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * kGatePitch), "r"(g2 | g3 << 16)
                 : "memory");
    const uint32_t b0 = __ballot_sync(~0u, g0 != 0), b1 = __ballot_sync(~0u, g1 != 0);
    const uint32_t b2 = __ballot_sync(~0u, g2 != 0), b3 = __ballot_sync(~0u, g3 != 0);
    nnz_ += __popc(b0) + __popc(b1) + __popc(b2) + __popc(b3);
    const uint32_t fired = columns_fired(b0 | b2, b1 | b3);
    if (lane_ == 0) {
      reinterpret_cast<uint8_t*>(shared_.own)[block] = static_cast<uint8_t>(fired);
    }
    return fired;
  }

  // The row of w_up into the L2.
  __device__ __forceinline__ void ask_for_up(int neuron) const {
    bulk_prefetch(p_.up + int64_t{first_ + neuron} * p_.width, p_.width * 2);
  }
};

}  // namespace twell::few_token::gate_up
