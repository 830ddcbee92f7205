// SPDX-License-Identifier: Apache-2.0
// The screen GEMM for Hopper: the 8-bit product of rotated rows of x and w_gate, whose epilogue
// decides which neurons may fire for which tokens (rotated_screen.h). The main loop is that
// of the gate GEMM (paired_gemm_loop_sm90.cuh) with k-steps of 128 bytes and 32-bit sums.
// A sum becomes one bit, its sign behind the bound, so a finished tile is stored at once. Warpgroup
// 1 starts a tile kLead k-steps behind warpgroup 0, so that one decides while the other multiplies.
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/ops/ffn/screened/screened_ffn_cuda.h"
#include "twell/ops/matmul/paired_gemm_loop_sm90.cuh"

namespace twell {
namespace screen_gemm {
namespace {

using paired_gemm::kBytesA;
using paired_gemm::kBytesB;
using paired_gemm::kCluster;
using paired_gemm::kConsumers;
using paired_gemm::kStageBytes;
using paired_gemm::kStages;
using paired_gemm::kThreads;
using paired_gemm::kTileM;
using paired_gemm::kTileN;
using paired_gemm::release;
using paired_gemm::Ring;
using paired_gemm::Schedule;
using paired_gemm::Unit;
using paired_gemm::UnitOrder;

constexpr int kStepColumns = 128;  // of a k-step: 128 bytes, the widest swizzle
constexpr int kLead = 2;
constexpr int kLeadBarrier = 1;
constexpr uint32_t kSharedBytes = paired_gemm::kRingBytes;

struct Params {
  CUtensorMap map_x;       // [M, D], boxes of kTileM rows
  CUtensorMap map_x_half;  // the same, boxes of kTileM / 2 rows
  CUtensorMap map_w;       // [F, D], boxes of kTileN / kCluster rows
  const int2* bounds;      // [M] base and slope of each token
  const int32_t* spread;   // [F rounded up to kTileN]
  uint32_t* words;         // CandidatesCuda::words
  int32_t* row_count;      // [M], 0 at the start
  UnitOrder order;
  int tokens;  // M
  int ffn;     // F
  int tiles;   // of kTileN neurons
  int k_steps;
  int scale;  // 1 << screen_shift(D)
};

__device__ __forceinline__ void produce(const Params& params, const Ring& ring, uint32_t rank) {
  const UnitOrder order = params.order;
  const int clusters = gridDim.x / kCluster;
  paired_gemm::Producer producer{ring, rank};
  for (int index = blockIdx.x / kCluster; index < order.count(); index += clusters) {
    if (index + clusters >= order.count()) {  // this is the last unit
      gpu::wait_for_previous_kernel();
      gpu::allow_next_kernel();
    }
    const Unit unit = order.locate(index, rank);
    producer.load<kStepColumns>(unit.half ? params.map_x_half : params.map_x, unit.row,
                                params.map_w, unit.n_tile, params.k_steps,
                                unit.half ? kStageBytes - kBytesA / 2 : kStageBytes);
  }
}

// State of a consumer warpgroup, kept across units.
struct Consumer {
  const Params& params;
  const Ring& ring;
  const int warpgroup;
  gpu::RingCursor<kStages> cursor{};

  // Multiplies 64 tokens by N neurons of a unit. The warpgroups of a whole unit take different
  // tokens; those of a half unit take different neurons.
  template <int N>
  __device__ __forceinline__ void multiply(int32_t (&acc)[128]) {
    using namespace gpu;
    const uint32_t a = ring.stages + (N == kTileN ? warpgroup * (kBytesA / 2) : 0);
    const uint32_t b = ring.stages + kBytesA + (N == kTileN ? 0 : warpgroup * (kBytesB / 2));
    // With fewer k-steps than stages warpgroup 0 could arrive for two tiles before warpgroup 1
    // does.
    const bool leads = params.k_steps >= kStages;
    if (leads && warpgroup == 1) named_barrier(kLeadBarrier, kConsumers * 128);
    int previous = 0;
    for (int k = 0; k < params.k_steps; ++k) {
      barrier_wait(ring.full + cursor.stage * 8, cursor.parity);
      const uint32_t offset = cursor.stage * kStageBytes;
      const uint64_t operand_a = k_major_operand(a + offset);
      const uint64_t operand_b = k_major_operand(b + offset);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kStepColumns / 32; ++i) {
        wgmma_s8<N>(acc, operand_a + i * 2, operand_b + i * 2, k > 0 || i > 0);
      }
      wgmma_commit();
      if (leads && warpgroup == 0 && k == kLead - 1) {
        named_barrier_arrive(kLeadBarrier, kConsumers * 128);
      }
      if (k > 0) {
        wgmma_wait<1>();
        release(ring, previous);
      }
      previous = cursor.stage;
      cursor.advance();
    }
    wgmma_wait<0>();
    release(ring, previous);
  }

  // Decides for 64 tokens by N neurons and stores the bits.
  template <int N>
  __device__ __forceinline__ void decide(const int32_t (&acc)[128], const Unit& unit) const {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int part = N == kTileN ? 0 : warpgroup;  // of the tile's neurons
    const int row =
        unit.row + (N == kTileN ? warpgroup * 64 : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const auto bound = [&](int token) {
      return token < params.tokens ? __ldg(params.bounds + token) : int2{0, 0};
    };
    const int2 upper = bound(row), lower = bound(row + 8);
    const auto* spread =
        reinterpret_cast<const int2*>(params.spread + unit.n_tile * kTileN + part * N) + t;
    // Bit i: a sum of columns 8 i + 2 t (+ 1) is below the bound.
    uint32_t below[4] = {};  // upper row: both columns; lower row: both columns
    const auto append = [&](uint32_t& bits, int32_t sum, const int2& token, int neuron) {
      const int32_t screen = sum * params.scale + (token.y * neuron + token.x);
      bits = __funnelshift_l(static_cast<uint32_t>(screen), bits, 1);
    };
#pragma unroll
    for (int i = N / 8 - 1; i >= 0; --i) {
      const int2 neurons = __ldg(spread + 4 * i);
      append(below[0], acc[4 * i], upper, neurons.x);
      append(below[1], acc[4 * i + 1], upper, neurons.y);
      append(below[2], acc[4 * i + 2], lower, neurons.x);
      append(below[3], acc[4 * i + 3], lower, neurons.y);
    }
    const int inside = min(max((params.ffn - unit.n_tile * kTileN - part * N) / 8, 0), N / 8);
    const uint32_t mask = inside == 32 ? ~0u : (1u << inside) - 1;
    uint32_t bits[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) bits[j] = ~below[j] & mask;
    store<N>(bits, row, unit.n_tile, t, part);
  }

 private:
  template <int N>
  __device__ __forceinline__ void store(const uint32_t (&bits)[4], int row, int n_tile, int t,
                                        int part) const {
    const int64_t word = (int64_t{row} * params.tiles + n_tile) * 8 + 2 * t;
    const int64_t below = int64_t{8} * params.tiles * 8;  // words from a row to the eighth below
    const bool has_upper = row < params.tokens, has_lower = row + 8 < params.tokens;
    if constexpr (N == kTileN) {
      if (has_upper) *reinterpret_cast<uint2*>(params.words + word) = {bits[0], bits[1]};
      if (has_lower) *reinterpret_cast<uint2*>(params.words + word + below) = {bits[2], bits[3]};
    } else {
      auto* halves = reinterpret_cast<uint16_t*>(params.words + word) + part;
      if (has_upper) {
        halves[0] = static_cast<uint16_t>(bits[0]);
        halves[2] = static_cast<uint16_t>(bits[1]);
      }
      if (has_lower) {
        halves[2 * below] = static_cast<uint16_t>(bits[2]);
        halves[2 * below + 2] = static_cast<uint16_t>(bits[3]);
      }
    }
    // A quad has the same two rows.
    int counts = __popc(bits[0]) + __popc(bits[1]) + ((__popc(bits[2]) + __popc(bits[3])) << 16);
    counts += __shfl_xor_sync(~0u, counts, 1);
    counts += __shfl_xor_sync(~0u, counts, 2);
    const int count = t == 0 ? counts & 0xffff : counts >> 16;
    if (t < 2 && count > 0 && (t == 0 ? has_upper : has_lower)) {
      atomicAdd(params.row_count + row + 8 * t, count);
    }
  }
};

__device__ __forceinline__ void consume(const Params& params, const Ring& ring, uint32_t rank,
                                        int warpgroup) {
  const UnitOrder order = params.order;
  const int clusters = gridDim.x / kCluster;
  Consumer consumer{params, ring, warpgroup};
  int32_t acc[128];
  for (int index = blockIdx.x / kCluster; index < order.count(); index += clusters) {
    const Unit unit = order.locate(index, rank);
    if (unit.half) {
      consumer.multiply<kTileN / 2>(acc);
    } else {
      consumer.multiply<kTileN>(acc);
    }
    gpu::wait_for_previous_kernel();  // by now row_count is cleared
    if (unit.half) {
      consumer.decide<kTileN / 2>(acc, unit);
    } else {
      consumer.decide<kTileN>(acc, unit);
    }
  }
}

// Launched as a dependent of the kernel that clears row_count, which itself starts only after all
// earlier work is complete. So this kernel waits only for the cleared row_count.
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    screen_gemm_sm90_kernel(const __grid_constant__ Params params) {
  using namespace gpu;
  extern __shared__ uint8_t memory[];
  const Ring ring(memory);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&params.map_x);
    prefetch_tensor_map(&params.map_x_half);
    prefetch_tensor_map(&params.map_w);
    ring.init();
  }
  cluster_sync();
  paired_gemm::run_roles([&] { produce(params, ring, rank); },
                         [&](int warpgroup) { consume(params, ring, rank, warpgroup); });
}

// A warp per token and tile of 256 neurons.
__global__ void check_screen_kernel(TwellPacked gate, const uint32_t* words,
                                    ActivityCuda* activity) {
  const int64_t tiles = gate.shape.tiles();
  const int64_t pair = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (pair >= gate.shape.rows * tiles) return;
  const int64_t row = pair / tiles, tile = pair % tiles;
  const auto missed = [&](int column) {
    return words[pair * 8 + column % 8] >> (column / 8) & 1 ? 0 : 1;
  };
  const int count = static_cast<int>(gate.count(row, tile));
  const uint32_t* const entries = gate.tile_words(row, tile) + 1;
  int misses = 0;
  if (!gate.spilled(row, tile)) {
    for (int i = threadIdx.x % 32; i < count; i += 32) misses += missed(entries[i] % kTileN);
  } else {
    const auto* values = reinterpret_cast<const uint16_t*>(gate.spilled_values(row, tile));
    for (int i = threadIdx.x % 32; i < kTileN; i += 32) misses += values[i] != 0 ? missed(i) : 0;
  }
  misses = __reduce_add_sync(~0u, misses);
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(&activity->checked_pairs, static_cast<unsigned long long>(count));
  if (misses > 0) atomicAdd(&activity->missed_pairs, static_cast<unsigned long long>(misses));
}

}  // namespace
}  // namespace screen_gemm

cudaError_t launch_check_screen(const TwellPacked& gate, const uint32_t* words,
                                ActivityCuda* activity, cudaStream_t stream) {
  constexpr int kThreadsPerCta = 256;
  const int64_t pairs = gate.shape.rows * gate.shape.tiles();
  if (pairs == 0) return cudaSuccess;
  screen_gemm::check_screen_kernel<<<static_cast<unsigned>(ceil_div(pairs, kThreadsPerCta / 32)),
                                     kThreadsPerCta, 0, stream>>>(gate, words, activity);
  return cudaGetLastError();
}

void screen_gemm_cuda(CudaContext& ctx, const ScreenGemmCuda& problem) {
  using namespace screen_gemm;
  check_ffn_call(ctx, problem.width, problem.ffn);
  TWELL_CHECK(can_rotate(problem.width),
              "a rotated screen needs a width that is a multiple of 16, at most {}, not {}",
              kMaxRotatedWidth, problem.width);
  if (problem.tokens == 0) return;
  const Schedule schedule(ctx.multiprocessors(), problem.tokens, problem.ffn);
  Params params;
  params.map_x =
      gpu::byte_matrix_tensor_map(problem.x.values, problem.tokens, problem.width, kTileM);
  params.map_x_half =
      gpu::byte_matrix_tensor_map(problem.x.values, problem.tokens, problem.width, kTileM / 2);
  params.map_w = gpu::byte_matrix_tensor_map(problem.gate.values, problem.ffn, problem.width,
                                             kTileN / kCluster);
  static_assert(sizeof(TokenBound) == sizeof(int2));
  params.bounds = reinterpret_cast<const int2*>(problem.x.bounds);
  params.spread = problem.gate.spread;
  params.words = problem.out.words;
  params.row_count = problem.out.row_count;
  params.order = schedule.order;
  params.tokens = static_cast<int>(problem.tokens);
  params.ffn = static_cast<int>(problem.ffn);
  params.tiles = static_cast<int>(ceil_div(problem.ffn, kTileN));
  params.k_steps = static_cast<int>(ceil_div(problem.width, kStepColumns));
  params.scale = 1 << screen_shift(problem.width);
  TWELL_CUDA_CHECK(cudaFuncSetAttribute(screen_gemm_sm90_kernel,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  TWELL_CUDA_CHECK(launch_clear_counts(problem.out.row_count, problem.tokens,
                                       problem.progress.words, problem.progress.size,
                                       ctx.stream()));
  TWELL_CUDA_CHECK(gpu::launch_dependent(screen_gemm_sm90_kernel,
                                         dim3(schedule.clusters * kCluster), kThreads, kSharedBytes,
                                         ctx.stream(), params));
}

}  // namespace twell
