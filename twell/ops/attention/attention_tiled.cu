// SPDX-License-Identifier: Apache-2.0
// Tiled causal attention on the tensor cores of sm_80: a block computes 128 queries of one head and
// loops over tiles of 64 keys, two in flight, with an online softmax (FlashAttention-2). Where
// shared memory is short of that, a block has 64 queries, and with heads of 256 one tile of keys at
// a time.
#include <cuda_bf16.h>

#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/launch.cuh"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/attention/attention_cuda.h"

namespace twell {
namespace {

constexpr int kKeys = 64;   // per tile
constexpr int kCopied = 8;  // values in a 16-byte copy

// Rows of shared tiles are padded by one piece, which keeps ldmatrix free of bank conflicts.
template <int kHeadDim>
constexpr int kRow = kHeadDim + kCopied;

// How a block divides the work; Buffers: tiles of keys, and of values, in shared memory.
template <int HeadDim, int Warps, int Buffers>
struct Tiling {
  static constexpr int kHeadDim = HeadDim, kBuffers = Buffers;
  static constexpr int kThreads = 32 * Warps;
  static constexpr int kQueries = 16 * Warps;  // per block: one row tile of an mma per warp
  static constexpr int kSharedBytes = (kQueries + 2 * Buffers * kKeys) * kRow<HeadDim> * 2;
};

__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes, or writes zeros if `valid` is false.
__device__ void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0));
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

__device__ void load_matrices(uint32_t (&r)[4], const __nv_bfloat16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}
__device__ void load_matrices_transposed(uint32_t (&r)[4], const __nv_bfloat16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}

// Copies kRows rows to a shared tile; zeros from row `rows` and column hd on.
template <int kHeadDim, int kRows, int kThreads>
__device__ void load_tile(__nv_bfloat16* tile, const __nv_bfloat16* from, int64_t stride, int rows,
                          int head_dim) {
  constexpr int kPieces = kHeadDim / kCopied;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, col = i % kPieces * kCopied;
    const bool valid = row < rows && col < head_dim;
    copy_async(tile + row * kRow<kHeadDim> + col, valid ? from + row * stride + col : from, valid);
  }
}

// A lane's part of a warp's 16 queries, as mma.sync lays them out: two rows, lane / 4 and 8 below.
struct LaneRows {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores so far, before scaling
  float sum[2] = {0.0f, 0.0f};            // this lane's part of the softmax's denominator
};

// scores += the warp's queries [16, hd] times a tile of keys.
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 8][4],
                                              const __nv_bfloat16* q_rows,
                                              const __nv_bfloat16* k_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    uint32_t a[4];
    load_matrices(a, q_rows + lane % 16 * kRow<kHeadDim> + k + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t b[4];
      load_matrices(
          b, k_tile + (n * 8 + lane / 16 * 8 + lane % 8) * kRow<kHeadDim> + k + lane / 8 % 2 * 8);
      gpu::mma_16x8x16(scores[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      gpu::mma_16x8x16(scores[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// Scores of keys that are hidden from a row become -infinity.
template <typename Hidden>
__device__ __forceinline__ void hide(float (&scores)[kKeys / 8][4], int key0, int row0,
                                     const Hidden& hidden) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (hidden(key0 + n * 8 + i % 2, row0 + i / 2 * 8)) scores[n][i] = -INFINITY;
    }
  }
}

// The online softmax: scores become weights relative to the new maximum, to which sums and outputs
// so far are shrunk.
template <int kHeadDim, bool kSliding>
__device__ __forceinline__ void add_tile(float (&scores)[kKeys / 8][4], LaneRows& rows,
                                         float (&out)[kHeadDim / 8][4], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // the lane's two rows
    float top = rows.max[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    // Finite: without a window every query sees key 0, and with one -infinity means that no key
    // of the row was visible yet.
    const float base = kSliding && top == -INFINITY ? 0.0f : top * scale;
    const float shrink = exp2f(rows.max[half] * scale - base);
    rows.max[half] = top;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[n][i] = exp2f(fmaf(scores[n][i], scale, -base));
        sum += scores[n][i];
      }
    }
    rows.sum[half] = rows.sum[half] * shrink + sum;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      out[n][2 * half] *= shrink;
      out[n][2 * half + 1] *= shrink;
    }
  }
}

// out += the weights [16, keys] times a tile of values.
template <int kHeadDim>
__device__ __forceinline__ void multiply_values(float (&out)[kHeadDim / 8][4],
                                                const float (&scores)[kKeys / 8][4],
                                                const __nv_bfloat16* v_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < kKeys; k += 16) {
    const int n0 = k / 8;
    const uint32_t a[4] = {gpu::bf16x2(scores[n0][0], scores[n0][1]),
                           gpu::bf16x2(scores[n0][2], scores[n0][3]),
                           gpu::bf16x2(scores[n0 + 1][0], scores[n0 + 1][1]),
                           gpu::bf16x2(scores[n0 + 1][2], scores[n0 + 1][3])};
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      uint32_t b[4];
      load_matrices_transposed(
          b, v_tile + (k + lane / 8 % 2 * 8 + lane % 8) * kRow<kHeadDim> + n * 8 + lane / 16 * 8);
      gpu::mma_16x8x16(out[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      gpu::mma_16x8x16(out[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// kSliding: queries attend through a window, whose mask costs registers.
template <typename Tiling, bool kSliding>
__global__ void __launch_bounds__(Tiling::kThreads) attention_tiled_kernel(AttentionCuda p) {
  constexpr int kHeadDim = Tiling::kHeadDim, kThreads = Tiling::kThreads;
  constexpr int kQueries = Tiling::kQueries, kBuffers = Tiling::kBuffers;
  extern __shared__ __align__(16) __nv_bfloat16 shared[];
  constexpr int kStride = kRow<kHeadDim>;
  __nv_bfloat16* q_tile = shared;
  __nv_bfloat16* k_tiles = q_tile + kQueries * kStride;  // kBuffers
  __nv_bfloat16* v_tiles = k_tiles + kBuffers * kKeys * kStride;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int sequence = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int q_len = p.sequences.q_len[sequence], kv_len = p.sequences.kv_len[sequence];
  // The last tile of queries sees the most keys, so it starts first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  if (first >= q_len) return;
  const int hd = static_cast<int>(p.head_dim), past = kv_len - q_len;
  const int64_t q_row = p.sequences.q_begin[sequence];
  const int64_t kv_begin = p.sequences.kv_begin[sequence];
  const int32_t* table = p.sequences.tables == nullptr ? nullptr : p.sequences.tables + kv_begin;
  const int64_t kv_at = head / (p.heads / p.kv_heads) * p.head_dim;

  const int last_key = min(kv_len, past + first + kQueries);  // one past it
  const int tile_end = (last_key + kKeys - 1) / kKeys;
  // Tiles before that are outside the window of the block's first query, and so of all.
  const int window = static_cast<int>(p.window);
  const int tile_begin = kSliding ? max(past + first + 1 - window, 0) / kKeys : 0;
  const auto load_keys = [&](int tile) {
    static_assert(kKvBlock == kKeys, "a tile is a block");
    const int slot = tile % kBuffers * kKeys * kStride, first_key = tile * kKeys;
    const int64_t row =
        table == nullptr ? kv_begin + first_key : int64_t{kv_row(table[tile], first_key)};
    const int64_t from = row * p.kv_stride + kv_at;
    const int left = kv_len - first_key;
    load_tile<kHeadDim, kKeys, kThreads>(k_tiles + slot, p.k + from, p.kv_stride, left, hd);
    load_tile<kHeadDim, kKeys, kThreads>(v_tiles + slot, p.v + from, p.kv_stride, left, hd);
    commit_copies();
  };
  load_tile<kHeadDim, kQueries, kThreads>(q_tile,
                                          p.q + (q_row + first) * p.q_stride + head * p.head_dim,
                                          p.q_stride, q_len - first, hd);
  load_keys(tile_begin);

  float out[kHeadDim / 8][4] = {};
  LaneRows rows;
  const float scale = kLog2E * rsqrtf(static_cast<float>(hd));
  const int row0 = past + first + warp * 16 + lane / 4;  // position of this lane's first row
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    if constexpr (kBuffers == 1) {
      if (tile > tile_begin) load_keys(tile);
      wait_copies<0>();
    } else if (tile + 1 < tile_end) {
      load_keys(tile + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const __nv_bfloat16* k_tile = k_tiles + tile % kBuffers * kKeys * kStride;
    const __nv_bfloat16* v_tile = v_tiles + tile % kBuffers * kKeys * kStride;

    float scores[kKeys / 8][4] = {};
    multiply_keys<kHeadDim>(scores, q_tile + warp * 16 * kStride, k_tile);
    const int key0 = tile * kKeys + lane % 4 * 2;
    // The causal mask may hide a key of this tile from a query of the block.
    if (tile * kKeys + kKeys - 1 > past + first) {
      hide(scores, key0, row0, [](int key, int row) { return key > row; });
    }
    // The window may hide a key of this tile from the block's last query.
    if (kSliding && tile * kKeys <= past + first + kQueries - 1 - window) {
      hide(scores, key0, row0, [&](int key, int row) { return key <= row - window; });
    }
    add_tile<kHeadDim, kSliding>(scores, rows, out, scale);
    multiply_values<kHeadDim>(out, scores, v_tile);
    __syncthreads();  // before the next load overwrites this tile
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int row = first + warp * 16 + lane / 4 + half * 8;
    if (row >= q_len) continue;
    __nv_bfloat16* to = p.out + ((q_row + row) * p.heads + head) * p.head_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      if (n * 8 < hd) {
        *reinterpret_cast<__nv_bfloat162*>(to + n * 8) =
            __floats2bfloat162_rn(out[n][2 * half] / sum, out[n][2 * half + 1] / sum);
      }
    }
  }
}

template <typename Tiling, bool kSliding>
cudaError_t launch(const AttentionCuda& p, cudaStream_t stream) {
  constexpr int kQueries = Tiling::kQueries, kShared = Tiling::kSharedBytes;
  const auto kernel = attention_tiled_kernel<Tiling, kSliding>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>((p.sequences.max_q_len + kQueries - 1) / kQueries),
                  static_cast<unsigned>(p.heads), static_cast<unsigned>(p.sequences.count));
  kernel<<<grid, Tiling::kThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

// Small is what every GPU has the shared memory for.
template <typename Large, typename Small, bool kSliding>
cudaError_t launch_fitting(const AttentionCuda& p, cudaStream_t stream) {
  static_assert(Small::kSharedBytes <= kPortableSharedMemory);
  int most = 0;
  const cudaError_t status = gpu::device_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (status != cudaSuccess) return status;
  return most < Large::kSharedBytes ? launch<Small, kSliding>(p, stream)
                                    : launch<Large, kSliding>(p, stream);
}

template <bool kSliding>
cudaError_t launch_size(const AttentionCuda& p, cudaStream_t stream) {
  using Of32 = Tiling<32, 8, 2>;
  using Of64 = Tiling<64, 8, 2>;
  static_assert(Of64::kSharedBytes <= kPortableSharedMemory);
  if (p.head_dim <= 32) return launch<Of32, kSliding>(p, stream);
  if (p.head_dim <= 64) return launch<Of64, kSliding>(p, stream);
  if (p.head_dim <= 128) {
    return launch_fitting<Tiling<128, 8, 2>, Tiling<128, 4, 2>, kSliding>(p, stream);
  }
  return launch_fitting<Tiling<256, 8, 2>, Tiling<256, 4, 1>, kSliding>(p, stream);
}

}  // namespace

cudaError_t launch_attention_tiled(const AttentionCuda& p, cudaStream_t stream) {
  return p.window > 0 ? launch_size<true>(p, stream) : launch_size<false>(p, stream);
}

}  // namespace twell
