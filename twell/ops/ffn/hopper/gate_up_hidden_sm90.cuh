// SPDX-License-Identifier: Apache-2.0
// h of a cluster's neurons that fire: their rows of w_up gathered, partial sums to the CTA that has
// their tokens, times the gate.
#pragma once

#include "twell/ops/ffn/hopper/gate_up_gate_sm90.cuh"

namespace twell::few_token::gate_up {

class Up : public Gate {
 public:
  using Gate::Gate;

  __device__ __forceinline__ void hidden() {
    if (p_.up == nullptr) {
      if (!multiplies()) ask_for_down();
      finish(0, 0);
    } else if (total_ <= kFewRows && q_.slice_chunks <= kXChunks) {
      up_few();
    } else if (total_ <= 64) {
      up<64, 8>();
    } else if (total_ <= 128) {
      up<128, 5>();
    } else {
      up<192, 3>();
    }
  }

 protected:
  // All rows are gathered, then multiplied. One piece of code, whether there are up to 64 or more:
  // what few clusters run would have to be fetched by them. Columns past the rows are whatever
  // lies there, and are not used.
  __device__ __forceinline__ void up_few() {
    const bool more = total_ > 64;
    const int blocks = more ? kFewRows / 8 : 8, chunk_bytes = blocks * 8 * kRowBytes;
    const int sent_bytes = kSplit * blocks * kBlockBytes;
    const uint32_t sent = smem_address(&shared_.barriers.up);
    if (threadIdx.x == 0) barrier_arrive_expect(sent, adds() ? sent_bytes : 0);
    gather(blocks * 8);
    float sums[kFewRows / 2];
#pragma unroll
    for (int i = 0; i < kFewRows / 2; ++i) sums[i] = 0.0f;
    barrier_wait(barrier(shared_.barriers.gathered, up_step_), phase(up_step_));
    fence_async_shared();
    if (!multiplies()) ask_for_down();  // not before: the rows of w_up would wait behind
    // Two warpgroups take turns.
    const int groups = chunks_ >= 6 ? 2 : 1, group = multiplies() ? 0 : 1;
    if (group < groups) multiply_few(sums, chunk_bytes, group, groups);
    if (groups == 2) add_second(sums, chunk_bytes, group);
    if (threadIdx.x == 0) barrier_arrive(barrier(shared_.barriers.released, up_step_));
    ++up_step_;
    if (more) {  // otherwise there is room for sums beside the rows
      __syncwarp();
      cluster_arrive_relaxed();
      cluster_wait();  // nobody needs its rows any more
    }
    const uint32_t place = ring_ + (more ? 0 : kApart);
    if (sends_) {
      const uint32_t at = remote_address(sums_place(place, rank_, blocks), warp_);
      send_blocks<0, 8>(sums, at, remote_address(sent, warp_), true);
      send_blocks<8, kFewRows / 8>(sums, at, remote_address(sent, warp_), more);
    }
    barrier_wait(sent, up_phase_);
    up_phase_ ^= 1;
    finish(place, sent_bytes);
  }
  __device__ __forceinline__ void multiply_few(float (&sums)[kFewRows / 2], int chunk_bytes,
                                               int group, int groups) {
#pragma unroll 1
    for (int c = group; c < chunks_; c += groups) {
      const int x_index = x_step_ + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      const uint64_t x = k_major_operand(x_place(x_index));
      const uint64_t rows = k_major_operand(ring_ + c * chunk_bytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<kFewRows, false>(sums, x + k * 2, rows + k * 2, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
  }
  // The second group's sums, by way of where its own rows, those of odd chunks, have been: four
  // blocks of columns a chunk.
  __device__ __forceinline__ void add_second(float (&sums)[kFewRows / 2], int chunk_bytes,
                                             int group) {
    const uint32_t place = ring_ + warp_ % 4 * kBlockBytes + lane_ * 16;
    const auto block_place = [&](int block) {
      return place + (block / 4 * 2 + 1) * chunk_bytes + block % 4 * (4 * kBlockBytes);
    };
    if (group == 1) {
#pragma unroll
      for (int b = 0; b < kFewRows / 8; ++b) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(block_place(b)),
                     "f"(sums[4 * b]), "f"(sums[4 * b + 1]), "f"(sums[4 * b + 2]),
                     "f"(sums[4 * b + 3])
                     : "memory");
      }
    }
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int b = 0; b < kFewRows / 8; ++b) {
        const float4 other = load_sums(block_place(b));
        sums[4 * b] += other.x;
        sums[4 * b + 1] += other.y;
        sums[4 * b + 2] += other.z;
        sums[4 * b + 3] += other.w;
      }
    }
  }

  // More rows, or wider slices: chunks of them go through a ring.
  template <int Rows, int Stages>
  __device__ __forceinline__ void up() {
    static_assert(Stages * Rows * kRowBytes <= kRing && Stages <= kBarriers);
    float acc[Rows / 2];
#pragma unroll
    for (int i = 0; i < Rows / 2; ++i) acc[i] = 0.0f;
    if (multiplies()) {
      multiply_gathered<Rows, Stages>(acc);
    } else {
      gather_chunks<Rows, Stages>();
      // Not before the rows of w_up are there: they would wait behind.
      const int last = up_step_ + chunks_ - 1;
      if (chunks_ > 0) barrier_wait(barrier(shared_.barriers.gathered, last), phase(last));
      ask_for_down();
    }
    up_step_ += chunks_;
    if (!keep_x_) x_step_ += chunks_;
    constexpr int kSent = kSentBytes<Rows>;
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
    const uint32_t sent = smem_address(&shared_.barriers.up);
    if (threadIdx.x == 0) barrier_arrive_expect(sent, adds() ? kSent : 0);
    if (sends_) send_sums<Rows>(acc, ring_, sent, rank_, warp_);
    barrier_wait(sent, up_phase_);
    up_phase_ ^= 1;
    finish(ring_, kSent);
  }

  // acc += x times up to Rows gathered rows.
  template <int Rows, int Stages>
  __device__ __forceinline__ void multiply_gathered(float (&acc)[Rows / 2]) {
    const uint64_t* full = shared_.barriers.gathered;
    const uint64_t* empty = shared_.barriers.released;
    const int step = up_step_, x_step = x_step_;
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      const int x_index = x_step + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      barrier_arrive(barrier(full, step + c));  // this warp gathers nothing
      barrier_wait(barrier(full, step + c), phase(step + c));
      fence_async_shared();
      wgmma_fence();
      const uint64_t a = k_major_operand(x_place(x_index));
      const uint64_t b = k_major_operand(ring_ + stage * (Rows * kRowBytes));
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<Rows, false>(acc, a + k * 2, b + k * 2, true);
      wgmma_commit();
      wgmma_wait<1>();
      if (c > 0 && threadIdx.x == 0) barrier_arrive(barrier(empty, step + c - 1));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
    wgmma_wait<0>();
    if (chunks_ > 0 && threadIdx.x == 0) barrier_arrive(barrier(empty, step + chunks_ - 1));
  }

  // This CTA's slices of the rows that fire, in chunks of `rows` rows: row by row, which memory
  // likes best.
  __device__ __forceinline__ void gather(int rows) {
    static_assert(kFewRows <= 32 * kWarps);
    const int at = lane_ * kWarps + warp_, mine = at < total_ ? shared_.list[at] : 0;
#pragma unroll 2
    for (int i = 0; i * kWarps + warp_ < total_; ++i) {
      const int row = i * kWarps + warp_;
      const __nv_bfloat16* from = p_.up + int64_t{first_ + __shfl_sync(~0u, mine, i)} * p_.width;
#pragma unroll 2
      for (int piece = lane_; piece < chunks_ * 8; piece += 32) {
        const int k = chunk_k(piece / 8) + piece % 8 * 8;
        gather16(ring_ + (piece / 8 * rows + row) * kRowBytes + ((piece ^ row) % 8) * 16,
                 k < p_.width ? from + k : from, k < p_.width);
      }
    }
    gather_arrive(barrier(shared_.barriers.gathered, up_step_));
  }
  // A thread has a 16-byte piece of every 16th row.
  template <int Rows, int Stages>
  __device__ __forceinline__ void gather_chunks() {
    constexpr int kEvery = kGatherers / 8;
    const int me = static_cast<int>(threadIdx.x) - 128, row = me / 8, piece = me % 8;
    const uint32_t to = ring_ + row * kRowBytes + (piece ^ (row % 8)) * 16;
#pragma unroll 1
    for (int at = me; at < total_; at += kGatherers) {
      bulk_prefetch(p_.up + int64_t{first_ + shared_.list[at]} * p_.width + k_begin_,
                    min(p_.width - k_begin_, chunks_ * kChunk) * 2);
    }
    const __nv_bfloat16* from[Rows / kEvery];
#pragma unroll
    for (int i = 0; i < Rows / kEvery; ++i) {
      const int at = i * kEvery + row;
      from[i] = nullptr;
      if (at < total_) from[i] = p_.up + int64_t{first_ + shared_.list[at]} * p_.width;
    }
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      if (c >= Stages) {
        const int before = up_step_ + c - Stages;
        barrier_wait(barrier(shared_.barriers.released, before), phase(before));
      }
      if (!keep_x_ && warp_ == kProducer) load_x(c);
      const int k = chunk_k(c) + piece * 8;
#pragma unroll
      for (int i = 0; i < Rows / kEvery; ++i) {
        if (from[i] != nullptr) {  // what stays there otherwise only reaches that row's own sums
          gather16(to + stage * (Rows * kRowBytes) + i * kEvery * kRowBytes,
                   k < p_.width ? from[i] + k : p_.up, k < p_.width);
        }
      }
      gather_arrive(barrier(shared_.barriers.gathered, up_step_ + c));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
  }
  // Asks for the rows of w_down, and tells the next kernel of them.
  __device__ __forceinline__ void ask_for_down() {
    const int at = (static_cast<int>(threadIdx.x) - 128) * kSplit + rank_;
    if (at < total_) {
      bulk_prefetch(p_.down + int64_t{first_ + shared_.list[at]} * p_.width, p_.width * 2);
    }
    publish();
  }

  // h of neurons that fire and this CTA's tokens; sums: 0 without a gate.
  __device__ __forceinline__ void finish(uint32_t sums, int sent_bytes) {
    if (!adds()) return;
#pragma unroll 1
    for (int b = warp_; b * 8 < total_; b += kWarps) {
      float4 up{1.0f, 1.0f, 1.0f, 1.0f};
      if (sums != 0) up = add_sums(sums, b, sent_bytes / kSplit);
      finish_hidden(b * 8, up);
    }
  }
  __device__ __forceinline__ void finish_hidden(int begin, const float4& up) {
    const int token = lane_ / 4, column = lane_ % 4 * 2;
    auto& out = shared_.out[warp_];
    const float values[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = begin + column + i % 2, half = i / 2 * 8;
      uint16_t gate = 0;
      if (at < total_) {
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(gate)
                     : "r"(gate_place(token + half) + shared_.list[at] * 2));
      }
      const float h = __uint_as_float(uint32_t{gate} << 16) * values[i];
      out[column + i % 2][token + half] = gate == 0 ? 0 : __bfloat16_as_ushort(__float2bfloat16(h));
    }
    __syncwarp();
    const int neuron = lane_ / 2, half = lane_ % 2 * 8;
    if (lane_ < 16 && begin + neuron < total_) {
      const int64_t row = first_ + shared_.list[begin + neuron];
      *reinterpret_cast<uint4*>(p_.hidden.h + row * kSplitTokens + rank_ * 16 + half) =
          *reinterpret_cast<const uint4*>(&out[neuron][half]);
    }
    __syncwarp();
  }
};

}  // namespace twell::few_token::gate_up
