// SPDX-License-Identifier: Apache-2.0
// First kernel of the layer for 9 tokens and more: a cluster of four CTAs makes the gate of up to
// 192 neurons, and h of those that fire. Each CTA has a quarter of the width, of which it keeps
// its slice of x in shared memory for both products; tokens are the 64-row operand of WGMMA.
//   gate: the rows of the first weight through the copy engine, in a ring; partial sums to the CTA
//         that has their tokens; which neurons fire to all four
//   up:   the slices of the rows of w_up that fire, gathered into the same ring; partial sums as
//         before; h = gate * up
// Rows of w_down of neurons that fire are asked into the L2 for the next kernel. A launch runs its
// code once, so that fetching it counts: loops are not unrolled where nothing is gained.
#include <algorithm>

#include "twell/ops/few_token_ffn/gate_up_gate_sm90.cuh"

namespace twell::few_token {
namespace gate_up {
namespace {

template <int Tiles>
class Kernel : public Gate<Tiles> {
  using L = Layout<Tiles>;
  using Base = Cta<Tiles>;

 public:
  using Gate<Tiles>::Gate;

  __device__ __forceinline__ void run() {
    this->prepare();
    if (warp_ != kProducer) wait_for_previous_kernel();
    if (warp_ == 0) {
      this->set_released();
      // Not before: launching a kernel would come before the end of the one in front.
      allow_next_kernel();
    }
    const int clusters = static_cast<int>(gridDim.x) / kSplit;
    const int passes = (p_.ffn + q_.neurons - 1) / q_.neurons;
    for (int pass = static_cast<int>(blockIdx.x) / kSplit; pass < passes; pass += clusters) {
      first_ = pass * q_.neurons;
      this->gate();
      this->list();
      if (total_ > 0) {
        hidden();
      } else {
        this->publish();
      }
      fence_async_shared();  // the ring goes back to the copy engine
      if (pass + clusters < passes) __syncthreads();
      first_pass_ = false;
    }
    this->count();
  }

 private:
  using Base::barrier;
  using Base::chunk_k;
  using Base::chunks_;
  using Base::first_;
  using Base::first_pass_;
  using Base::gate_place;
  using Base::k_begin_;
  using Base::keep_x_;
  using Base::kProducer;
  using Base::lane_;
  using Base::load_x;
  using Base::multiplies;
  using Base::own_tiles;
  using Base::p_;
  using Base::phase;
  using Base::q_;
  using Base::rank_;
  using Base::ring_;
  using Base::sends_;
  using Base::shared_;
  using Base::total_;
  using Base::up_phase_;
  using Base::up_step_;
  using Base::warp_;
  using Base::x_place;
  using Base::x_step_;

  __device__ __forceinline__ void hidden() {
    if (p_.up == nullptr) {
      if (!multiplies()) ask_for_down();
      finish_tiles(0, own_tiles(0, Tiles), 0, 0);
    } else if (total_ <= 64) {
      up<64, 64, 8>();
    } else if (total_ <= 80) {
      up<96, 80, 8>();
    } else if (total_ <= 128) {
      up<128, 128, 5>();
    } else {
      up<192, 192, 3>();
    }
  }

  template <int Rows, int Pitch, int Stages>
  __device__ __forceinline__ void up() {
    static_assert(Stages * Pitch * kRowBytes <= kRing && Stages <= kBarriers);
    constexpr int kSets = Rows <= 96 ? 2 : 1;  // that are multiplied into in turns
    float acc[kSets][Rows / 2];
#pragma unroll
    for (int i = 0; i < kSets * Rows / 2; ++i) acc[i % kSets][i / kSets] = 0.0f;
    if (chunks_ <= Stages) {
      gather<Pitch>();
    } else if (!multiplies()) {
      gather_chunks<Pitch, Stages>();
    }
    if (multiplies()) {
      multiply_gathered<Rows, Pitch, Stages>(acc);
    } else {
      // Not before the rows of w_up are there: they would wait behind.
      const int last = chunks_ <= Stages ? up_step_ : up_step_ + chunks_ - 1;
      barrier_wait(barrier(shared_.barriers.gathered, last), phase(last));
      ask_for_down();
    }
    up_step_ += chunks_ <= Stages ? 1 : chunks_;
    if (!keep_x_) x_step_ += chunks_;
    constexpr int kSent = kSentBytes<Rows>, kAtOnce = Tiles * kSent <= kRing ? Tiles : 1;
    constexpr bool kBeside = Rows == 64 && kApart + Tiles * kSent <= kRing;
    constexpr int kPlace = kBeside ? kApart : 0;
#pragma unroll 1
    for (int tile = 0; tile < Tiles; tile += kAtOnce) {
      const int own = own_tiles(tile, kAtOnce);
      if constexpr (!kBeside) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
      }
      const uint32_t sent = smem_address(&shared_.barriers.up);
      if (threadIdx.x == 0) barrier_arrive_expect(sent, own * kSent);
      if (sends_ && warp_ / 4 >= tile && warp_ / 4 < tile + kAtOnce) {
        send_sums<Rows>(acc[0], ring_ + kPlace + (warp_ / 4 - tile) * kSent, sent, rank_,
                        warp_ % 4);
      }
      barrier_wait(sent, up_phase_);
      up_phase_ ^= 1;
      finish_tiles(tile, own, ring_ + kPlace, kSent);
    }
  }

  // acc += x times up to Rows gathered rows.
  template <int Rows, int Pitch, int Stages, int Sets>
  __device__ __forceinline__ void multiply_gathered(float (&acc)[Sets][Rows / 2]) {
    const uint64_t* full = shared_.barriers.gathered;
    const uint64_t* empty = shared_.barriers.released;
    const int step = up_step_, x_step = x_step_;
    const bool at_once = chunks_ <= Stages;
    if (at_once) {
      barrier_wait(barrier(full, step), phase(step));
      fence_async_shared();
    }
    int stage = 0;
#pragma unroll 1
    for (int c = 0; c < chunks_; ++c) {
      const int x_index = x_step + c;
      barrier_wait(barrier(shared_.barriers.x, x_index), phase(x_index));
      if (!at_once) {
        barrier_arrive(barrier(full, step + c));  // this warp gathers nothing then
        barrier_wait(barrier(full, step + c), phase(step + c));
        fence_async_shared();
      }
      wgmma_fence();
      const uint64_t a = k_major_operand(x_place(x_index, warp_ / 4));
      const uint64_t b = k_major_operand(ring_ + stage * (Pitch * kRowBytes));
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<Rows, false>(acc[k % Sets], a + k * 2, b + k * 2, true);
      wgmma_commit();
      wgmma_wait<1>();
      if (c > 0 && !at_once && threadIdx.x % 128 == 0) barrier_arrive(barrier(empty, step + c - 1));
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier(empty, at_once ? step : step + chunks_ - 1));
    if constexpr (Sets == 2) {
#pragma unroll
      for (int i = 0; i < Rows / 2; ++i) acc[0][i] += acc[1][i];
    }
  }

  // This CTA's slices of the rows that fire: row by row, which memory likes best, where there is
  // room for all of them.
  template <int Rows>
  __device__ __forceinline__ void gather() {
    static_assert(Rows <= 32 * L::kWarps);
    const int at = lane_ * L::kWarps + warp_, mine = at < total_ ? shared_.list[at] : 0;
#pragma unroll 2
    for (int i = 0; i * L::kWarps + warp_ < total_; ++i) {
      const int row = i * L::kWarps + warp_;
      const __nv_bfloat16* from = p_.up + int64_t{first_ + __shfl_sync(~0u, mine, i)} * p_.width;
#pragma unroll 2
      for (int piece = lane_; piece < chunks_ * 8; piece += 32) {
        const int k = chunk_k(piece / 8) + piece % 8 * 8;
        gather16(ring_ + (piece / 8 * Rows + row) * kRowBytes + ((piece ^ row) % 8) * 16,
                 k < p_.width ? from + k : from, k < p_.width);
      }
    }
    gather_arrive(barrier(shared_.barriers.gathered, up_step_));
  }
  // A thread has a 16-byte piece of every 16th row.
  template <int Rows, int Stages>
  __device__ __forceinline__ void gather_chunks() {
    constexpr int kEvery = kGatherers / 8;
    const int me = static_cast<int>(threadIdx.x) - Tiles * 128, row = me / 8, piece = me % 8;
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
    const int at = (static_cast<int>(threadIdx.x) - Tiles * 128) * kSplit + rank_;
    if (at < total_) {
      bulk_prefetch(p_.down + int64_t{first_ + shared_.list[at]} * p_.width, p_.width * 2);
    }
    this->publish();
  }

  // h of neurons that fire and this CTA's tokens; sums: 0 without a gate.
  __device__ __forceinline__ void finish_tiles(int tile, int tiles, uint32_t sums, int sent_bytes) {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
#pragma unroll 1
      for (int b = warp_; b * 8 < total_; b += L::kWarps) {
        float4 up{1.0f, 1.0f, 1.0f, 1.0f};
        if (sums != 0) up = add_sums(sums + i * sent_bytes, b, sent_bytes / kSplit);
        finish_hidden(tile + i, b * 8, up);
      }
    }
  }
  __device__ __forceinline__ void finish_hidden(int tile, int begin, const float4& up) {
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
                     : "r"(gate_place(tile, token + half) + shared_.list[at] * 2));
      }
      const float h = __uint_as_float(uint32_t{gate} << 16) * values[i];
      out[column + i % 2][token + half] = gate == 0 ? 0 : __bfloat16_as_ushort(__float2bfloat16(h));
    }
    __syncwarp();
    const int neuron = lane_ / 2, half = lane_ % 2 * 8;
    if (lane_ < 16 && begin + neuron < total_) {
      const int64_t row = first_ + shared_.list[begin + neuron];
      *reinterpret_cast<uint4*>(p_.hidden.h + row * (Tiles * kTile) + tile * kTile + rank_ * 16 +
                                half) = *reinterpret_cast<const uint4*>(&out[neuron][half]);
    }
    __syncwarp();
  }
};

template <int Tiles>
__global__ void __cluster_dims__(kSplit, 1, 1) __maxnreg__(Tiles == 1 ? 160 : 168)
    gate_up_sm90_kernel(const __grid_constant__ SplitGateUp params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ typename Kernel<Tiles>::Shared shared;
  Kernel<Tiles>(params, shared, memory).run();
}

// The kernel behind this one has to fit beside it: that takes all of the shared memory.
template <int Tiles>
cudaError_t allow_shared_memory() {
  const auto* kernel = reinterpret_cast<const void*>(gate_up_sm90_kernel<Tiles>);
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<Tiles>::kBytes);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
}

template <int Tiles>
cudaError_t count_clusters(int* clusters) {
  const cudaError_t status = allow_shared_memory<Tiles>();
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kSplit);
  config.blockDim = dim3(Layout<Tiles>::kThreads);
  config.dynamicSmemBytes = Layout<Tiles>::kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, gate_up_sm90_kernel<Tiles>, &config);
}

template <int Tiles>
cudaError_t launch(const SplitGateUp& params, int clusters, cudaStream_t stream) {
  const cudaError_t status = allow_shared_memory<Tiles>();
  if (status != cudaSuccess) return status;
  return launch_dependent(gate_up_sm90_kernel<Tiles>, dim3(clusters * kSplit),
                          Layout<Tiles>::kThreads, Layout<Tiles>::kBytes, stream, params);
}

}  // namespace
}  // namespace gate_up

cudaError_t count_gate_up_clusters_sm90(int tiles, int* clusters) {
  return tiles == 1 ? gate_up::count_clusters<1>(clusters) : gate_up::count_clusters<2>(clusters);
}

cudaError_t launch_gate_up_sm90(const SplitGateUp& params, int tiles, int clusters,
                                cudaStream_t stream) {
  return tiles == 1 ? gate_up::launch<1>(params, clusters, stream)
                    : gate_up::launch<2>(params, clusters, stream);
}

}  // namespace twell::few_token
