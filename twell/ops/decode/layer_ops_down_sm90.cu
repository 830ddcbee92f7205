// SPDX-License-Identifier: Apache-2.0
// y = h w for few tokens, w [F, D] with a neuron per row: a sum over rows. A cluster of eight CTAs
// makes 64 columns, each CTA of it from an eighth of the neurons; eight lanes read 128 bytes of a
// row, through a ring in shared memory whose slots each thread fills and reads by itself. Sums meet
// in the warp, in the CTA and in the cluster, in a fixed order.
#include <cooperative_groups.h>

#include "twell/ops/decode/layer_ops.h"
#include "twell/sm90/barrier.cuh"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/copy.cuh"
#include "twell/sm90/dependent_launch.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::layer_ops {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kCluster = 8;
constexpr int kColumns = 64;
constexpr int kLanes = kColumns / 8;                 // that read a row together
constexpr int kRowsAtOnce = kWarps * (32 / kLanes);  // by a CTA

constexpr int kDepth = 11;  // rows in flight per lane: half of what 5,632 neurons give each
constexpr int kRingBytes = kDepth * kThreads * 16;

template <int kRows>
struct Shared {
  float of_warp[kWarps][kRows][kColumns];
  float of_cta[kRows][kColumns];
};

// kRows: at least the tokens.
template <int kRows>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 2)
    layer_ops_down_sm90_kernel(const __grid_constant__ Down p) {
  namespace cg = cooperative_groups;
  __shared__ Shared<kRows> shared;
  extern __shared__ __align__(16) uint8_t ring[];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int rank = static_cast<int>(sm90::cluster_rank());
  const int64_t column = int64_t{blockIdx.x} / kCluster * kColumns + lane % kLanes * 8;
  const bool inside = column < p.width;
  const int64_t share = (p.ffn + kCluster - 1) / kCluster;
  const int64_t end = min((rank + 1) * share, p.ffn);
  const int64_t first = rank * share + warp * (32 / kLanes) + lane / kLanes;
  const uint32_t slots = sm90::smem_address(ring) + thread * 16;
  const auto load = [&](int64_t row, int slot) {
    const bool valid = inside && row < end;
    sm90::gather16(slots + slot * (kThreads * 16), valid ? p.w + row * p.width + column : p.w,
                   valid);
    sm90::gathers_commit();
  };
  sm90::allow_next_kernel();
  if (!p.constant_weights) sm90::wait_for_previous_kernel();
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) load(first + slot * kRowsAtOnce, slot);
  if (p.constant_weights) sm90::wait_for_previous_kernel();
  float sum[kRows][8] = {};
  // All of a warp's lanes take as many rows, so that they read h of the next one ahead together.
  const auto load_h = [&](int64_t row, float(&h)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      h[r] = r < p.tokens && row < end ? __bfloat162float(p.h[r * p.ffn + row]) : 0.0f;
    }
  };
  constexpr int kAhead = kRows == 8 ? 2 : 4;  // values of h on their way
  float h[kAhead][kRows];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_h(first + i * kRowsAtOnce, h[i]);
  const int64_t warp_first = rank * share + warp * (32 / kLanes);
  int slot = 0;
  for (int64_t base = 0; warp_first + base < end; base += kAhead * kRowsAtOnce) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t row = first + base + i * kRowsAtOnce;
      sm90::gathers_wait<kDepth - 1>();
      const uint4 w = sm90::load_shared16(slots + slot * (kThreads * 16));
      load(row + kDepth * kRowsAtOnce, slot);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
      const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 v = sm90::to_floats(pairs[k]);
          sum[r][2 * k] = fmaf(h[i][r], v.x, sum[r][2 * k]);
          sum[r][2 * k + 1] = fmaf(h[i][r], v.y, sum[r][2 * k + 1]);
        }
      }
      load_h(row + kAhead * kRowsAtOnce, h[i]);
    }
  }
  sm90::gathers_wait<0>();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int offset = kLanes; offset < 32; offset *= 2) {
        sum[r][i] += __shfl_xor_sync(~0u, sum[r][i], offset);
      }
      if (lane < kLanes) shared.of_warp[warp][r][lane * 8 + i] = sum[r][i];
    }
  }
  __syncthreads();
  for (int i = thread; i < kRows * kColumns; i += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      total += shared.of_warp[from][i / kColumns][i % kColumns];
    }
    shared.of_cta[i / kColumns][i % kColumns] = total;
  }
  sm90::cluster_sync();
  // Each CTA adds up an eighth of the columns.
  constexpr int kOwned = kColumns / kCluster;
  if (thread < kRows * kOwned) {
    const int token = thread / kOwned, at = rank * kOwned + thread % kOwned;
    const int64_t to = int64_t{blockIdx.x} / kCluster * kColumns + at;
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < kCluster; ++from) {
      total += *cg::this_cluster().map_shared_rank(&shared.of_cta[token][at], from);
    }
    if (token < p.tokens && to < p.width) {
      const int64_t index = token * p.width + to;
      if (p.residual != nullptr) total += __bfloat162float(p.residual[index]);
      p.y[index] = __float2bfloat16(total);
    }
  }
  sm90::cluster_sync();  // no CTA leaves while others read its sums
}

template <int kRows>
cudaError_t launch(const Down& problem, cudaStream_t stream) {
  const int64_t groups = (problem.width + kColumns - 1) / kColumns;
  const cudaError_t status = cudaFuncSetAttribute(
      layer_ops_down_sm90_kernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(layer_ops_down_sm90_kernel<kRows>,
                                dim3(static_cast<unsigned>(groups * kCluster)), kThreads,
                                kRingBytes, stream, problem);
}

}  // namespace

cudaError_t launch_down_sm90(const Down& problem, cudaStream_t stream) {
  if (problem.tokens < 1 || problem.tokens > kMaxTokens || problem.width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  if (problem.tokens == 1) return launch<1>(problem, stream);
  if (problem.tokens == 2) return launch<2>(problem, stream);
  if (problem.tokens <= 4) return launch<4>(problem, stream);
  return launch<8>(problem, stream);
}

}  // namespace twell::layer_ops
