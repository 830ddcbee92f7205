// SPDX-License-Identifier: Apache-2.0
// Gate, and up for the neurons that fire, in one kernel. h^T = W x^T on mma.sync, weights as the
// 16-row operand, tokens as the 8-column one, so that a single token wastes no weight traffic.
//
// The width is cut into eight parts. A warp multiplies one group of 16 neurons by one part, and
// the eight partial sums of an output are added in a fixed order. Where the eight warps live
// depends on the number of tokens: with up to 8 in one CTA; with more, a cluster of 2 or 4 CTAs
// cuts the width first, so that each CTA keeps only its slice of x, in shared memory.
#include <cooperative_groups.h>

#include "twell/ops/few_token_ffn/gate_up_products_sm90.cuh"
#include "twell/sm90/dependent_launch.cuh"

namespace twell::few_token {
namespace {

template <typename C>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    sm90::cluster_sync();
  }
}

template <typename C>
__device__ __forceinline__ void store_partial(const float (&acc)[C::kTiles][4], uint8_t* partial) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
#pragma unroll
  for (int tile = 0; tile < C::kTiles; ++tile) {
    const int quad = tile * 2 + column / 2, within = column % 2 * 8;
    *reinterpret_cast<float2*>(partial + partial_offset<C>(row, quad) + within) =
        make_float2(acc[tile][0], acc[tile][1]);
    *reinterpret_cast<float2*>(partial + partial_offset<C>(row + 8, quad) + within) =
        make_float2(acc[tile][2], acc[tile][3]);
  }
}

// The eight partial sums of four tokens of one neuron of the cluster, added in order.
template <typename C>
__device__ __forceinline__ float4 sum_partials(uint8_t* shared, int neuron, int quad) {
  namespace cg = cooperative_groups;
  float4 sum{};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int warp = neuron / kGroup * C::kWarpsPerGroup + part % C::kWarpsPerGroup;
    uint8_t* from = shared + warp * C::kWarpBytes + partial_offset<C>(neuron % kGroup, quad);
    if constexpr (C::kCluster > 1) {
      from = cg::this_cluster().map_shared_rank(from, part / C::kWarpsPerGroup);
    }
    const float4 v = *reinterpret_cast<const float4*>(from);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  return sum;
}

// This CTA's slice of x, zeros past the width: [tiles * 8, slice_k], the 16-byte pieces of odd rows
// swapped by fours, so that the two rows that a quarter of a warp reads at a time fall into
// different banks. Rows past the last token stay unwritten and only reach their own sums.
__device__ void stage_x(const GateUp& problem, uint8_t* slice, int slice_begin, int slice_k) {
  constexpr int kAtOnce = 4;
  const int pieces = slice_k / 8, total = problem.tokens * pieces;
  for (int base = threadIdx.x; base < total; base += kAtOnce * blockDim.x) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = base + i * blockDim.x;
      const int token = index / pieces, k = slice_begin + index % pieces * 8;
      values[i] = uint4{};
      if (index < total && k < problem.width) {
        values[i] =
            __ldg(reinterpret_cast<const uint4*>(problem.x + int64_t{token} * problem.width + k));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = base + i * blockDim.x;
      const int token = index / pieces, piece = index % pieces;
      if (index >= total) break;
      *reinterpret_cast<uint4*>(slice + token * slice_k * 2 + (piece ^ (token % 2 * 4)) * 16) =
          values[i];
    }
  }
}

template <typename C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kMaxThreads, C::kResidents)
    gate_up_sm90_kernel(const __grid_constant__ Params params) {
  namespace cg = cooperative_groups;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint8_t fires[kMaxNeurons];
  const GateUp& problem = params.problem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = params.groups * C::kWarpsPerGroup;
  const int rank = C::kCluster == 1 ? 0 : static_cast<int>(sm90::cluster_rank());
  const int group = warp / C::kWarpsPerGroup;
  const int first_group = blockIdx.x / C::kCluster * params.groups;
  const int first_neuron = (first_group + group) * kGroup;  // of this warp
  const int slice_k = params.part * C::kWarpsPerGroup, slice_begin = rank * slice_k;
  const int k_begin = slice_begin + warp % C::kWarpsPerGroup * params.part;
  const int left = max(min(problem.width - k_begin, params.part), 0);
  uint8_t* ring = shared + warp * C::kWarpBytes;
  uint8_t* x_slice = shared + warps * C::kWarpBytes;
  WarpRing<C> product(problem, sm90::smem_address(ring), sm90::smem_address(x_slice), slice_k,
                      slice_begin, k_begin, (left + kStepK - 1) / kStepK);
  const int rows = max(min(problem.ffn - first_neuron, kGroup), 0);
  sm90::allow_next_kernel();
  const __nv_bfloat16* first = problem.first + int64_t{first_neuron} * problem.width;
  // Where x goes through shared memory it comes first: weights are multiplied as they arrive.
  const bool early = problem.early_weights && !C::kStagedX;
  if (early) product.start(first, (1u << rows) - 1);
  sm90::wait_for_previous_kernel();
  if constexpr (C::kStagedX) {
    stage_x(problem, x_slice, slice_begin, slice_k);
    __syncthreads();
  }
  if (!early) product.start(first, (1u << rows) - 1);
  float acc[C::kTiles][4] = {};
  product.finish(acc);
  store_partial<C>(acc, ring);
  sync_cluster<C>();

  // Outputs in quads of four tokens, shared out over the cluster, at most one per thread.
  const int owned = params.groups * kGroup * C::kQuads / C::kCluster;
  const bool owner = static_cast<int>(threadIdx.x) < owned;  // whole warps
  const int index = rank * owned + threadIdx.x;
  const int neuron = index / C::kQuads, quad = index % C::kQuads;  // neuron of the cluster
  const int global_neuron = first_group * kGroup + neuron;
  uint32_t gate[4] = {};  // bf16 bits
  bool mine_fires = false;
  if (owner) {
    const float4 sum = sum_partials<C>(shared, neuron, quad);
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    int count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = quad * 4 + i < problem.tokens && global_neuron < problem.ffn;
      gate[i] = exists ? relu_bf16(values[i]) : 0;
      count += gate[i] != 0;
    }
    int total = count;  // over the neuron's tokens
#pragma unroll
    for (int step = 1; step < C::kQuads; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    mine_fires = total > 0;
    if (quad == 0) {
      for (int i = 0; i < C::kCluster; ++i) {
        uint8_t* flag = fires + neuron;
        if constexpr (C::kCluster > 1) flag = cg::this_cluster().map_shared_rank(flag, i);
        *flag = mine_fires;
      }
      if (mine_fires) {
        bulk_prefetch(problem.down + int64_t{global_neuron} * problem.width, problem.width * 2);
      }
      if (problem.activity != nullptr) {
        if (mine_fires) {
          atomicAdd(&problem.activity->nnz, static_cast<unsigned long long>(total));
        }
        if (global_neuron == 0) {
          atomicAdd(&problem.activity->tokens, static_cast<unsigned long long>(problem.tokens));
        }
      }
    }
  }
  sync_cluster<C>();

  const uint32_t firing =
      __ballot_sync(~0u, lane < kGroup && fires[group * kGroup + lane % kGroup] != 0);
  if (rank == 0 && warp % C::kWarpsPerGroup == 0 && lane == 0 && rows > 0) {
    problem.fired[first_group + group] = static_cast<uint16_t>(firing);
    // The reader takes two groups at a time.
    const int next = first_group + group + 1;
    if (first_neuron + kGroup >= problem.ffn && next % 2 != 0) problem.fired[next] = 0;
  }
  float up[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (problem.up != nullptr) {
    if (firing != 0) {
      product.start(problem.up + int64_t{first_neuron} * problem.width, firing);
#pragma unroll
      for (int tile = 0; tile < C::kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][i] = 0.0f;
      }
      product.finish(acc);
      store_partial<C>(acc, ring);
    }
    sync_cluster<C>();
    if (mine_fires) {
      const float4 sum = sum_partials<C>(shared, neuron, quad);
      up[0] = sum.x;
      up[1] = sum.y;
      up[2] = sum.z;
      up[3] = sum.w;
    }
  }
  if (mine_fires) {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float h = __uint_as_float(gate[i] << 16) * up[i];
      bits[i] = gate[i] == 0 ? 0 : __bfloat16_as_ushort(__float2bfloat16(h));
    }
    *reinterpret_cast<uint2*>(problem.hidden + int64_t{global_neuron} * (C::kTiles * 8) +
                              quad * 4) =
        make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  }
  // No CTA leaves while another may read its partial sums.
  if constexpr (C::kCluster > 1) sync_cluster<C>();
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename C>
size_t shared_bytes(int groups, int part) {
  const size_t ring = size_t(groups) * C::kWarpsPerGroup * C::kWarpBytes;
  return ring + (C::kStagedX ? size_t(C::kTiles) * 8 * part * C::kWarpsPerGroup * 2 : 0);
}

template <typename C>
cudaError_t launch(const GateUp& problem, int multiprocessors, cudaStream_t stream) {
  const int part = ceil_div(problem.width, kParts * kStepK) * kStepK;
  const int groups = ceil_div(problem.ffn, kGroup);
  // As many groups per cluster as let all clusters run at one time, if that many fit.
  const int slots = max(multiprocessors * C::kResidents / C::kCluster, 1);
  const int per_cluster = min(max(ceil_div(groups, slots), 1), C::kMaxGroups);
  const size_t shared = shared_bytes<C>(per_cluster, part);
  const cudaError_t status =
      cudaFuncSetAttribute(gate_up_sm90_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  return sm90::launch_dependent(gate_up_sm90_kernel<C>,
                                dim3(ceil_div(groups, per_cluster) * C::kCluster),
                                per_cluster * C::kWarpsPerGroup * 32, static_cast<uint32_t>(shared),
                                stream, Params{problem, part, per_cluster});
}

// x's slice in shared memory where there is room beside the rings of at least one resident CTA.
template <typename Staged, typename Direct>
cudaError_t launch_either(const GateUp& problem, int multiprocessors, cudaStream_t stream) {
  const int part = ceil_div(problem.width, kParts * kStepK) * kStepK;
  constexpr size_t kMostShared = 226 * 1024;
  return shared_bytes<Staged>(Staged::kMaxGroups, part) <= kMostShared
             ? launch<Staged>(problem, multiprocessors, stream)
             : launch<Direct>(problem, multiprocessors, stream);
}

}  // namespace

// Sized for a width of 2048 and an FFN size of 5632 on 132 multiprocessors with 227 KiB each: every
// warp of the layer resident at one time, and as much of the weight as possible asked for at once.
cudaError_t launch_gate_up_sm90(const GateUp& problem, int multiprocessors, cudaStream_t stream) {
  switch (token_tiles(problem.tokens)) {
    case 2:
      return launch_either<Config<2, 2, 3, 3, 2, true>, Config<2, 2, 3, 3, 1, false>>(
          problem, multiprocessors, stream);
    case 4:
      return launch_either<Config<4, 4, 3, 6, 2, true>, Config<4, 4, 3, 6, 1, false>>(
          problem, multiprocessors, stream);
    default:
      return launch_either<Config<8, 4, 2, 6, 2, true>, Config<8, 4, 2, 6, 1, false>>(
          problem, multiprocessors, stream);
  }
}

}  // namespace twell::few_token
