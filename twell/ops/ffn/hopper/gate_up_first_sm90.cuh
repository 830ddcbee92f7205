// SPDX-License-Identifier: Apache-2.0
// The gate's products of a CTA: its slice of the first weight's rows through the copy engine, in a
// ring whose stages are a chunk of half of the neurons each.
#pragma once

#include "twell/ops/ffn/hopper/gate_up_cta_sm90.cuh"

namespace twell::few_token::gate_up {

class First : public Cta {
 public:
  using Cta::Cta;

  // The warp that loads: the first stages of weights that are constant, before the CTAs meet.
  __device__ __forceinline__ void begin() {
    if (warp_ != kProducer || !p_.early_weights) return;
    first_ = static_cast<int>(blockIdx.x) / kSplit * q_.neurons;
    begun_ = min(kOnTheirWay, 2 * chunks_);
#pragma unroll 1
    for (int i = 0; i < begun_; ++i) load_first(i);
  }

 protected:
  // Stages on their way, while the kernel in front still runs: what it asks for would wait behind
  // more.
  static constexpr int kOnTheirWay = 2;
  static constexpr int kTail = 2;

  __device__ __forceinline__ void produce() {
    const bool early = first_pass_ && p_.early_weights;
    if (first_pass_ && !early) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = first_pass_ ? begun_ : 0; i < min(2 * chunks_, kGateStages); ++i) {
      if (early && i >= kOnTheirWay) {
        const uint32_t before = barrier(shared_.barriers.full, i - kOnTheirWay);
        while (!barrier_done(before, 0) && !is_released()) {
        }
      }
      load_first(i);
    }
    if (early) wait_for_previous_kernel();
    if (first_pass_ || !keep_x_) {
#pragma unroll 1
      for (int c = 0; c < min(chunks_, kXChunks); ++c) load_x(c);
    }
#pragma unroll 1
    for (int i = kGateStages; i < 2 * chunks_; ++i) {
      const int before = step_ + i - kGateStages;
      barrier_wait(barrier(shared_.barriers.empty, before), phase(before));
      load_first(i);
      if (i % 2 == 0 && i / 2 >= kXChunks) load_x(i / 2);
    }
  }

  // halves[i] += x times that half of the pass's neurons, of all chunks but the tail.
  __device__ __forceinline__ void multiply_head(float (&halves)[2][kHalf / 2]) {
    int step = step_;
#pragma unroll 1
    for (int c = 0; c < head(); ++c) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      const uint64_t a = k_major_operand(x_place(x_index));
#pragma unroll
      for (int half = 0; half < 2; ++half, ++step) {
        multiply_stage(halves[half], a, step);
        wgmma_wait<1>();
        if (step > step_) release(step - 1);
      }
    }
    wgmma_wait<0>();
    if (head() > 0) release(step - 1);
  }
  // The last two chunks are taken by one half of the neurons after the other. Leaves products on
  // their way.
  __device__ __forceinline__ void multiply_tail(float (&sums)[kHalf / 2], int half) {
    int step = step_ + 2 * head() + half * (chunks_ - head());
#pragma unroll 1
    for (int c = head(); c < chunks_; ++c, ++step) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      multiply_stage(sums, k_major_operand(x_place(x_index)), step);
    }
  }
  __device__ __forceinline__ void release_tail() {
#pragma unroll 1
    for (int i = 2 * head(); i < 2 * chunks_; ++i) release(step_ + i);
  }

 private:
  __device__ __forceinline__ int head() const { return max(chunks_ - kTail, 0); }
  // Of load i of a pass; the last six loads have slots 0 to 5 of the ring.
  __device__ __forceinline__ uint32_t stage_place(int i) const {
    const int slot0 = (kGateStages - 2 * chunks_ % kGateStages) % kGateStages;
    return ring_ + (slot0 + i) % kGateStages * kGateStage;
  }
  __device__ __forceinline__ void load_first(int i) {
    if (!elect_one()) return;
    const int in_tail = i - 2 * head(), tail = chunks_ - head(), rows = q_.neurons / 2;
    int chunk = i / 2, half = i % 2;
    if (in_tail >= 0) {
      half = in_tail >= tail ? 1 : 0;
      chunk = head() + in_tail - half * tail;
    }
    const uint32_t full = barrier(shared_.barriers.full, step_ + i);
    barrier_arrive_expect(full, rows * kRowBytes);
    tensor_load(stage_place(i), &q_.map_first, chunk_k(chunk), first_ + half * rows, full);
  }
  __device__ __forceinline__ void multiply_stage(float (&sums)[kHalf / 2], uint64_t x, int step) {
    barrier_wait(barrier(shared_.barriers.full, step), phase(step));
    const uint64_t rows = k_major_operand(stage_place(step - step_));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<kHalf, false>(sums, x + k * 2, rows + k * 2, true);
    wgmma_commit();
  }
  __device__ __forceinline__ void release(int step) {
    if (threadIdx.x == 0) barrier_arrive(barrier(shared_.barriers.empty, step));
  }
};

}  // namespace twell::few_token::gate_up
