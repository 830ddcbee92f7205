// SPDX-License-Identifier: Apache-2.0
// The kernel of batch_ops.h. A tile is 64 rows of the weights, WGMMA's 64-row operand, by all
// tokens; a cluster of CTAs computes it, each a part of k. One thread of the fifth warp fetches the
// CTA's weights and x into two ring buffers by TMA. It fills the ring of weights before it waits
// for the previous kernel, so that device memory is busy between kernels. Then the partial sums of
// the cluster go to shared memory, and each CTA adds up those of some tokens, in the order of the
// CTAs.
//
// The 64 rows are two halves of 32: of a gate and of an up projection, of both halves of a head,
// which rotate together, or of 64 rows that follow each other. A thread finishes four rows of each.
#include <cuda.h>

#include <algorithm>

#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/sm90/barrier.cuh"
#include "twell/gpu/sm90/copy.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/sm90/wgmma.cuh"
#include "twell/ops/skinny/batch_ops.h"

namespace twell::batch_ops {
namespace {

using namespace gpu;

constexpr int kRows = 64;         // weight rows of a tile
constexpr int kHalf = kRows / 2;  // rows of one box of weights
constexpr int kBlock = 64;        // values of k per stage, in bf16; twice as many bytes of e4m3
constexpr int kRowBytes = kBlock * 2;
constexpr int kStageBytes = kRows * kRowBytes;  // of weights; x has as much room
constexpr int kWeightStages = 8;
constexpr int kInputStages = 4;
constexpr int kConsumers = 128;  // a warpgroup
constexpr int kThreads = kConsumers + 32;
constexpr int kPitch = kRows + 4;  // floats per token of the sums, so that banks do not conflict
constexpr int kRingBytes = (kWeightStages + kInputStages) * kStageBytes;
constexpr int kBytes = kRingBytes + 1024;  // room to align to 1,024 bytes
constexpr int kMaxSplit = 8;               // CTAs of a cluster
static_assert(kMaxTokens * kPitch * 4 <= kWeightStages * kStageBytes);

struct Params {
  CUtensorMap first, second;  // weights of the two halves
  CUtensorMap x;
  int tokens;
  int blocks;     // of k
  bool constant;  // the weights may be read before the previous kernel ends
  ActivityCuda* activity;
  // Of operands in e4m3: the scales of x and of the rows of both halves, and their numbers.
  const float *x_scales, *first_scales, *second_scales;
  int weight_rows;
};

// The scales of four rows from `row` on; 0 past the last row, a multiple of 8, where nothing is
// stored.
__device__ __forceinline__ float4 load_scales(const float* scales, int row, int rows) {
  return row < rows ? *reinterpret_cast<const float4*>(scales + row) : float4{};
}
__device__ __forceinline__ void scale4(float (&v)[4], float token, const float4& s) {
  v[0] *= token * s.x;
  v[1] *= token * s.y;
  v[2] *= token * s.z;
  v[3] *= token * s.w;
}

// Four consecutive results of a token.
__device__ __forceinline__ void store4(__nv_bfloat16* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(bf16x2(v[0], v[1]), bf16x2(v[2], v[3]));
}
__device__ __forceinline__ void add4(float (&v)[4], const __nv_bfloat16* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = to_floats(bits.x), high = to_floats(bits.y);
  v[0] += low.x;
  v[1] += low.y;
  v[2] += high.x;
  v[3] += high.y;
}
__device__ __forceinline__ float4 load_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ float relu(float v) { return v < 0.0f ? 0.0f : v; }  // NaN stays
// The same where FATReLU's threshold is 0.
__device__ __forceinline__ float cut_relu(float v, float threshold) {
  const bool cut = threshold > 0.0f && __bfloat162float(__float2bfloat16(v)) <= threshold;
  return cut ? 0.0f : relu(v);
}

// What each product does with its sums. first_rows: of the two boxes of a tile's weights. finish:
// four results of each half from row `at` of the halves on, for a token. Returns active neurons.
struct LinearRows {
  static constexpr bool kDown = false;
  int64_t cols;
  const __nv_bfloat16* residual;
  void* y;
  int f32_out;
  int relu_out;            // 0: not, 1: ReLU, 2: its square
  float threshold = 0.0f;  // of FATReLU

  __device__ __forceinline__ int2 first_rows(int tile) const {
    return {tile * kRows, tile * kRows + kHalf};
  }
  __device__ __forceinline__ int store(int token, int64_t col, float (&v)[4]) const {
    if (col >= cols) return 0;
    const int64_t at = token * cols + col;
    if (residual != nullptr) add4(v, residual + at);
    int active = 0;
    if (relu_out) {
#pragma unroll
      for (float& value : v) {
        value = cut_relu(value, threshold);
        active += !(value == 0.0f);
        if (relu_out == 2) value *= value;
      }
    }
    if (f32_out) {
      *reinterpret_cast<float4*>(static_cast<float*>(y) + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      store4(static_cast<__nv_bfloat16*>(y) + at, v);
    }
    return active;
  }
  __device__ __forceinline__ int finish(int tile, int token, int at, float (&a)[4],
                                        float (&b)[4]) const {
    const int64_t col = int64_t{tile} * kRows + at;
    return store(token, col, a) + store(token, col + kHalf, b);
  }
};

struct DownRows : LinearRows {
  static constexpr bool kDown = true;
};

struct GateUpRows {
  static constexpr bool kDown = false;
  int64_t ffn;
  __nv_bfloat16* h;
  bool squared;
  bool up_relu;     // dReLU
  float threshold;  // of FATReLU

  __device__ __forceinline__ int2 first_rows(int tile) const {
    return {tile * kHalf, tile * kHalf};
  }
  __device__ __forceinline__ int finish(int tile, int token, int at, float (&gate)[4],
                                        float (&up)[4]) const {
    const int64_t neuron = int64_t{tile} * kHalf + at;
    if (neuron >= ffn) return 0;
    int active = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float g = cut_relu(gate[i], threshold);
      active += !(g == 0.0f);
      gate[i] = (squared ? g * g : g) * gpu::relu_if(up_relu, up[i]);
    }
    store4(h + token * ffn + neuron, gate);
    return active;
  }
};

struct QkvRows {
  static constexpr bool kDown = false;
  int heads, kv_heads, head_dim;
  const __nv_bfloat16* bias;
  const float* cos;
  const float* sin;
  const int32_t* positions;
  const int64_t* cache_rows;
  __nv_bfloat16* q;
  int64_t q_stride;
  __nv_bfloat16* keys;
  __nv_bfloat16* values;

  __device__ __forceinline__ int2 first_rows(int tile) const {
    const int per_head = head_dim / kRows;
    const int first = tile / per_head * head_dim + tile % per_head * kHalf;
    return {first, first + head_dim / 2};
  }
  __device__ __forceinline__ int finish(int tile, int token, int at, float (&a)[4],
                                        float (&b)[4]) const {
    const int per_head = head_dim / kRows;
    const int head = tile / per_head, pair = tile % per_head * kHalf + at;
    if (bias != nullptr) {
      add4(a, bias + head * head_dim + pair);
      add4(b, bias + head * head_dim + head_dim / 2 + pair);
    }
    if (head < heads + kv_heads) {
      const int64_t place = int64_t{positions[token]} * (head_dim / 2) + pair;
      const float4 c = *reinterpret_cast<const float4*>(cos + place);
      const float4 s = *reinterpret_cast<const float4*>(sin + place);
      const float cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = a[i], high = b[i];
        a[i] = low * cosines[i] - high * sines[i];
        b[i] = high * cosines[i] + low * sines[i];
      }
    }
    __nv_bfloat16* to;
    if (head < heads) {
      to = q + token * q_stride + head * head_dim;
    } else {
      const bool key = head < heads + kv_heads;
      to = (key ? keys : values) + cache_rows[token] * (int64_t{kv_heads} * head_dim) +
           (head - heads - (key ? 0 : kv_heads)) * head_dim;
    }
    store4(to + pair, a);
    store4(to + head_dim / 2 + pair, b);
    return 0;
  }
};

__device__ __forceinline__ void init_barriers(uint64_t (&weights_full)[kWeightStages],
                                              uint64_t (&empty)[kWeightStages],
                                              uint64_t (&input_full)[kInputStages]) {
  for (int i = 0; i < kWeightStages; ++i) {
    barrier_init(smem_address(&weights_full[i]), 1);
    barrier_init(smem_address(&empty[i]), 1);
  }
  for (int i = 0; i < kInputStages; ++i) barrier_init(smem_address(&input_full[i]), 1);
  fence_barrier_init();
}

// Adds the product of a block of k, whose first step may begin anew, to acc.
template <bool kE4m3, bool kDown>
__device__ __forceinline__ void multiply(float (&acc)[32], uint64_t w, uint64_t x,
                                         bool adds_first) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlock / 16; ++step) {  // 32 bytes of a row each
    const bool adds = adds_first || step > 0;
    if constexpr (kE4m3) {
      wgmma_e4m3<64>(acc, w + step * 32 / 16, x + step * 32 / 16, adds);
    } else {
      wgmma<64, false, kDown>(acc, w + step * (kDown ? 2048 : 32) / 16, x + step * 32 / 16, adds);
    }
  }
}

// Writes a warp's sums as [token][row].
__device__ __forceinline__ void put_sums(const float (&acc)[32], uint8_t* to_bytes, int warp,
                                         int lane) {
  float* to = reinterpret_cast<float*>(to_bytes) + lane % 4 * 2 * kPitch + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += 8 * kPitch) {
    to[0] = acc[4 * i];
    to[kPitch] = acc[4 * i + 1];
    to[8] = acc[4 * i + 2];
    to[kPitch + 8] = acc[4 * i + 3];
  }
}

// The scales of the rows of both halves that a thread finishes, in e4m3.
struct RowScales {
  float4 first, second;

  __device__ __forceinline__ void load(const Params& p, int2 row) {
    const int at = static_cast<int>(threadIdx.x) % 8 * 4;
    first = load_scales(p.first_scales, row.x + at, p.weight_rows);
    second = load_scales(p.second_scales, row.y + at, p.weight_rows);
  }
  // Sums as numbers: times the scales of their token too.
  __device__ __forceinline__ void apply(const Params& p, int token, float (&a)[4],
                                        float (&b)[4]) const {
    const float of_token = p.x_scales[token];
    scale4(a, of_token, first);
    scale4(b, of_token, second);
  }
};

// Waits for the CTAs of a cluster of `size`.
__device__ __forceinline__ void sync_cluster(int size) {
  if (size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

// Adds a thread's active neurons to the layer's counts, and the tokens once.
__device__ __forceinline__ void add_activity(const Params& p, int active, int lane,
                                             bool tokens_too) {
  active = __reduce_add_sync(~0u, active);
  if (lane == 0 && active > 0) {
    atomicAdd(&p.activity->nnz, static_cast<unsigned long long>(active));
  }
  if (tokens_too && threadIdx.x == 0) {
    atomicAdd(&p.activity->tokens, static_cast<unsigned long long>(p.tokens));
  }
}

// Grid: CTAs of a cluster in x, tiles in y. kE4m3: x and the weights are e4m3.
template <typename Rows, bool kE4m3>
__global__ void __launch_bounds__(kThreads, 2)
    batch_ops_sm90_kernel(const __grid_constant__ Params p, const __grid_constant__ Rows rows) {
  static_assert(!(kE4m3 && Rows::kDown));
  constexpr int kColumns = kE4m3 ? 2 * kBlock : kBlock;  // of a stage
  extern __shared__ uint8_t unaligned[];
  __shared__ uint64_t weights_full[kWeightStages], input_full[kInputStages];
  __shared__ uint64_t empty[kWeightStages];  // the product of the block is done
  const uint32_t ring = (smem_address(unaligned) + 1023) & ~1023u;
  const uint32_t input_ring = ring + kWeightStages * kStageBytes;
  const int split = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int tile = static_cast<int>(blockIdx.y);
  const int first = rank * p.blocks / split, count = (rank + 1) * p.blocks / split - first;
  // The same in all lanes, so that the compiler keeps what follows from it in uniform registers,
  // which WGMMA takes its operands from.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  RowScales scales;
  if (threadIdx.x == 0) {
    init_barriers(weights_full, empty, input_full);
  }
  __syncthreads();
  allow_next_kernel();

  if (warp == kConsumers / 32) {
    if (elect_one()) {
      const int2 row = rows.first_rows(tile);
      const auto load_weights = [&](int block) {
        const uint32_t to = ring + block % kWeightStages * kStageBytes;
        const uint32_t full = smem_address(&weights_full[block % kWeightStages]);
        const int k = (first + block) * kColumns;
        barrier_arrive_expect(full, kStageBytes);
        if constexpr (Rows::kDown) {
          tensor_load(to, &p.first, row.x, k, full);
        } else {
          tensor_load(to, &p.first, k, row.x, full);
          tensor_load(to + kStageBytes / 2, &p.second, k, row.y, full);
        }
      };
      prefetch_tensor_map(&p.x);
      if (!p.constant) wait_for_previous_kernel();
      for (int block = 0; block < min(count, kWeightStages); ++block) load_weights(block);
      if (p.constant) wait_for_previous_kernel();
      for (int block = 0; block < count; ++block) {
        const int before = block - kInputStages;  // the block whose stage of x this one takes
        if (before >= 0) {
          barrier_wait(smem_address(&empty[before % kWeightStages]), before / kWeightStages % 2);
        }
        const uint32_t full = smem_address(&input_full[block % kInputStages]);
        barrier_arrive_expect(full, p.tokens * kRowBytes);
        tensor_load(input_ring + block % kInputStages * kStageBytes, &p.x,
                    (first + block) * kColumns, 0, full);
        if (before >= 0 && before + kWeightStages < count) load_weights(before + kWeightStages);
      }
    }
    __syncwarp();
  } else {
    // They come from device memory, which takes longer than all that follows the products, so that
    // they are asked for in front where that is allowed.
    if (kE4m3 && p.constant) scales.load(p, rows.first_rows(tile));
    float acc[32];
    for (int block = 0; block < count; ++block) {
      barrier_wait(smem_address(&weights_full[block % kWeightStages]), block / kWeightStages % 2);
      barrier_wait(smem_address(&input_full[block % kInputStages]), block / kInputStages % 2);
      const uint32_t stage = ring + block % kWeightStages * kStageBytes;
      // Addresses in operands count 16 bytes. Adding to them costs less than making them anew.
      const uint64_t w = Rows::kDown ? n_major_operand(stage, kStageBytes) : k_major_operand(stage);
      const uint64_t x = k_major_operand(input_ring + block % kInputStages * kStageBytes);
      multiply<kE4m3, Rows::kDown>(acc, w, x, block > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (block > 0 && threadIdx.x == 0) {
        barrier_arrive(smem_address(&empty[(block - 1) % kWeightStages]));
      }
    }
    wgmma_wait<0>();
    // All fetches of this CTA have been used, so that its sums may take their place: [token][row].
    named_barrier(1, kConsumers);
    put_sums(acc, unaligned + (ring - smem_address(unaligned)), warp, lane);
  }
  sync_cluster(split);

  if (warp < kConsumers / 32) {
    wait_for_previous_kernel();  // an earlier kernel may read what is written here
    if (kE4m3 && !p.constant) scales.load(p, rows.first_rows(tile));
    const int share = (p.tokens + split - 1) / split, end = min(p.tokens, (rank + 1) * share);
    const int at = static_cast<int>(threadIdx.x) % 8 * 4;
    int active = 0;
    for (int token = rank * share + static_cast<int>(threadIdx.x) / 8; token < end;
         token += kConsumers / 8) {
      float a[4] = {}, b[4] = {};
      for (int from = 0; from < split; ++from) {
        const uint32_t place =
            remote_address(ring + static_cast<uint32_t>(token * kPitch + at) * 4, from);
        const float4 low = load_cluster(place), high = load_cluster(place + kHalf * 4);
        a[0] += low.x, a[1] += low.y, a[2] += low.z, a[3] += low.w;
        b[0] += high.x, b[1] += high.y, b[2] += high.z, b[3] += high.w;
      }
      if constexpr (kE4m3) scales.apply(p, token, a, b);
      active += rows.finish(tile, token, at, a, b);
    }
    if (p.activity != nullptr) add_activity(p, active, lane, tile == 0 && rank == 0);
  }
  if (split > 1) cluster_sync();  // others may still read this CTA's sums
}

// CTAs of a cluster: enough to keep device memory busy, but no more, since each block of k and each
// cluster costs latency.
int split_of(int tiles, int blocks, int multiprocessors) {
  int split = 1;
  while (split < kMaxSplit && tiles * split < multiprocessors * 3 / 4 && blocks >= 8 * split) {
    split *= 2;
  }
  return split;
}

template <bool kE4m3, typename Rows>
cudaError_t launch_as(const Params& params, const Rows& rows, int tiles, cudaStream_t stream) {
  const auto kernel = batch_ops_sm90_kernel<Rows, kE4m3>;
  int multiprocessors = 0;
  cudaError_t status = device_attribute(multiprocessors, cudaDevAttrMultiProcessorCount);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (status != cudaSuccess) return status;
  const int split = split_of(tiles, params.blocks, multiprocessors);
  return launch_dependent_clusters(kernel, dim3(split, tiles), dim3(split), kThreads, kBytes,
                                   stream, params, rows);
}

template <typename Rows>
cudaError_t launch(const Params& params, const Rows& rows, int tiles, cudaStream_t stream) {
  if constexpr (!Rows::kDown) {
    if (params.x_scales != nullptr) return launch_as<true>(params, rows, tiles, stream);
  }
  return launch_as<false>(params, rows, tiles, stream);
}

bool in_bytes(const Input& input) { return !input.x_bytes.empty(); }
bool valid(const Input& input) {
  return input.tokens >= 1 && input.tokens <= kMaxTokens && input.width > 0 &&
         input.width % (in_bytes(input) ? 16 : 8) == 0 && input.norm == nullptr;
}
int parts(int64_t count, int of) { return static_cast<int>((count + of - 1) / of); }

Params params_of(const Input& input, ActivityCuda* activity) {
  Params params{};
  // A box of these tokens alone: TMA takes longer to fill rows outside the matrix with zeros. The
  // rest of a stage is never written, and only results of tokens that do not exist come from it.
  const auto tokens = static_cast<int32_t>(input.tokens);
  params.x = in_bytes(input)
                 ? byte_matrix_tensor_map(input.x_bytes.values, tokens, input.width, tokens)
                 : matrix_tensor_map(input.x, tokens, input.width, tokens);
  params.x_scales = input.x_bytes.scales;
  params.tokens = tokens;
  params.blocks = parts(input.width, in_bytes(input) ? 2 * kBlock : kBlock);
  params.constant = input.constant_weights;
  params.activity = activity;
  return params;
}

// The weights of both halves, [rows, D] each, in bf16 or e4m3.
void set_weights(Params& params, const Input& input, int64_t rows, const __nv_bfloat16* first,
                 const __nv_bfloat16* second, const ByteRowsCuda& first_bytes,
                 const ByteRowsCuda& second_bytes) {
  const auto map = [&](const __nv_bfloat16* w, const ByteRowsCuda& bytes) {
    return in_bytes(input) ? byte_matrix_tensor_map(bytes.values, rows, input.width, kHalf)
                           : matrix_tensor_map(w, rows, input.width, kHalf);
  };
  params.first = map(first, first_bytes);
  params.second = map(second, second_bytes);
  params.first_scales = first_bytes.scales;
  params.second_scales = second_bytes.scales;
  params.weight_rows = static_cast<int>(rows);
}

}  // namespace

cudaError_t launch_linear(const Linear& problem, cudaStream_t stream) {
  const auto& [input, cols, w, residual, y, f32_out, w_bytes] = problem;
  if (!valid(input) || cols % 8 != 0) return cudaErrorInvalidValue;
  Params params = params_of(input, nullptr);
  set_weights(params, input, cols, w, w, w_bytes, w_bytes);
  return launch<LinearRows>(params, {cols, residual, y, f32_out, 0}, parts(cols, kRows), stream);
}

cudaError_t launch_down(const Down& problem, cudaStream_t stream) {
  const auto& [input, cols, w, residual, y] = problem;
  if (!valid(input) || cols % 8 != 0) return cudaErrorInvalidValue;
  Params params = params_of(input, nullptr);
  params.first = params.second = matrix_tensor_map(w, input.width, cols, kBlock);
  return launch<DownRows>(params, {{cols, residual, y, 0, 0}}, parts(cols, kRows), stream);
}

bool takes(const Qkv& problem) { return valid(problem.input) && problem.head_dim % kRows == 0; }

cudaError_t launch_qkv(const Qkv& problem, cudaStream_t stream) {
  const Input& input = problem.input;
  if (!takes(problem)) return cudaErrorInvalidValue;
  const int64_t cols = (problem.heads + 2 * problem.kv_heads) * problem.head_dim;
  Params params = params_of(input, nullptr);
  set_weights(params, input, cols, problem.w, problem.w, problem.w_bytes, problem.w_bytes);
  const QkvRows rows{static_cast<int>(problem.heads),
                     static_cast<int>(problem.kv_heads),
                     static_cast<int>(problem.head_dim),
                     problem.bias,
                     problem.cos,
                     problem.sin,
                     problem.positions,
                     problem.cache_rows,
                     problem.q,
                     problem.q_stride,
                     problem.keys,
                     problem.values};
  return launch(params, rows, parts(cols, kRows), stream);
}

cudaError_t launch_gate_up(const GateUp& problem, cudaStream_t stream) {
  const Input& input = problem.input;
  if (!valid(input) || problem.ffn % 8 != 0) return cudaErrorInvalidValue;
  Params params = params_of(input, problem.activity);
  const bool gated = problem.w_gate != nullptr || !problem.gate_bytes.empty();
  set_weights(params, input, problem.ffn, gated ? problem.w_gate : problem.w_up, problem.w_up,
              gated ? problem.gate_bytes : problem.up_bytes, problem.up_bytes);
  if (!gated) {
    return launch<LinearRows>(
        params, {problem.ffn, nullptr, problem.h, 0, problem.squared ? 2 : 1, problem.threshold},
        parts(problem.ffn, kRows), stream);
  }
  return launch<GateUpRows>(
      params, {problem.ffn, problem.h, problem.squared, problem.up_relu, problem.threshold},
      parts(problem.ffn, kHalf), stream);
}

}  // namespace twell::batch_ops
