// SPDX-License-Identifier: Apache-2.0
// The projection of qkv_cuda.h: out [M, N] = x [M, D] w [N, D]^T on paired CTAs
// (paired_gemm_loop_sm90.cuh), with an epilogue that rotates queries and keys in registers and
// stores all three. A tile's epilogue runs in steps behind the next tile's products.
#include "twell/ops/qkv/qkv_cuda.h"

#include <algorithm>

#include "twell/base/cuda.h"
#include "twell/base/rounding.h"
#include "twell/gpu/bf16_pair.cuh"
#include "twell/gpu/sm90/store_matrices.cuh"
#include "twell/gpu/sm90/tensor_map.h"
#include "twell/gpu/warp_mma.cuh"
#include "twell/ops/matmul/paired_gemm_loop_sm90.cuh"
#include "twell/ops/route/route.h"

namespace twell {
namespace {

using namespace paired_gemm;
using gpu::bf16x2;
using gpu::high_half;
using gpu::low_half;
using gpu::opaque;

// x and w of the product.
struct Operands {
  CUtensorMap map_a;  // [M, K], boxes of kTileM rows
  CUtensorMap map_b;  // [N, K], boxes of kTileN / kCluster rows
  int k_steps;        // ceil(K / kTileK)
  int m_pairs;        // cluster tiles along M
  int n_tiles;        // along N
  int group;          // cluster tiles along M that share a sweep over N, for L2 reuse
};

constexpr int kStoredRows = 16;  // rows of a box of qkv_map

struct Target {
  CUtensorMap qkv_map;        // of qkv
  const float2* cos;          // [positions, hd / 4] pairs of neighbouring columns
  const float2* sin;          // [positions, hd / 4]
  const int32_t* positions;   // [M]
  const int64_t* cache_rows;  // [M], or null: no cache
  __nv_bfloat16* qkv;         // [M, columns]
  __nv_bfloat16* keys;        // [rows, kv_columns]
  __nv_bfloat16* values;      // [rows, kv_columns]
  int tokens;                 // M
  int q_columns;              // H * hd
  int kv_columns;             // H_kv * hd
  ScalesOfRows scales;        // of operands in 8 bits

  __host__ __device__ int columns() const { return q_columns + 2 * kv_columns; }
};

// The epilogue, kept by every consumer thread: 64 tokens by 256 columns of a warpgroup, as pairs of
// bf16. Lane 4g + t of warp w holds columns 8i + 2t and 8i + 2t + 1 of rows 16w + g (upper) and 16w
// + g + 8 (lower) as pair i. A lane thus has both halves of every head and can rotate them by
// itself. Its steps:
//   0                 find the tokens' places in the tables
//   1 to kHalf        rotate a pair of each half of all heads
//   the last four     store 64 columns each through shared memory: by TMA, or by ordinary stores to
//                     rows of a cache
template <int HeadDim, bool Spread>
class RotatedTile {
  static constexpr int kHalf = HeadDim / 16;  // pairs of half a head
  static constexpr int kHeads = 256 / HeadDim;
  static constexpr uint32_t kWarpBytes = 16 * 128;

 public:
  static constexpr bool kSpread = Spread;
  static constexpr int kSteps = 1 + kHalf + 4;
  static constexpr uint32_t kSharedBytes = 8 * kWarpBytes;

  // In 8 bits with the scales of this lane's rows and of the tile's columns.
  template <bool kBytes>
  __device__ __forceinline__ void take(const float (&acc)[128], float upper, float lower,
                                       const ColumnScales& columns, int first_row,
                                       int column_tile) {
    if constexpr (kBytes) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float2 scale = columns.of_columns(8 * i + threadIdx.x % 4 * 2);
        upper_[i] = bf16x2(acc[4 * i] * (upper * scale.x), acc[4 * i + 1] * (upper * scale.y));
        lower_[i] = bf16x2(acc[4 * i + 2] * (lower * scale.x), acc[4 * i + 3] * (lower * scale.y));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        upper_[i] = bf16x2(acc[4 * i], acc[4 * i + 1]);
        lower_[i] = bf16x2(acc[4 * i + 2], acc[4 * i + 3]);
      }
    }
    row_ = first_row + threadIdx.x % 128 / 32 * 16;
    column_ = column_tile * 256;
    step_ = 0;
  }

  __device__ __forceinline__ void advance(const Target& target, uint32_t shared) {
    switch (step_) {
      case 0:
        find(target);
        break;
      case 1:
        rotate<0>(target);
        break;
      case 2:
        rotate<1>(target);
        break;
      case 3:
        rotate<2>(target);
        break;
      case 4:
        rotate<3>(target);
        break;
      case kHalf + 1:
        store<0>(target, shared);
        break;
      case kHalf + 2:
        store<1>(target, shared);
        break;
      case kHalf + 3:
        store<2>(target, shared);
        break;
      case kHalf + 4:
        store<3>(target, shared);
        break;
      default:
        if constexpr (kHalf == 8) {
          if (step_ == 5) rotate<4>(target);
          if (step_ == 6) rotate<5>(target);
          if (step_ == 7) rotate<6>(target);
          if (step_ == 8) rotate<7>(target);
        }
        if (done()) return;
    }
    ++step_;
  }
  __device__ __forceinline__ bool done() const { return step_ == kSteps; }
  __device__ __forceinline__ void finish() const { gpu::bulk_store_wait(); }

 private:
  // Rows past the last token are rotated by position 0, but not stored.
  __device__ __forceinline__ void find(const Target& target) {
    const int row = row_ + threadIdx.x % 32 / 4;
    const auto place = [&](int of) {
      const int position = of < target.tokens ? target.positions[of] : 0;
      return position * (HeadDim / 4) + static_cast<int>(threadIdx.x % 4);
    };
    upper_place_ = place(row);
    lower_place_ = place(row + 8);
  }

  // Rotates pair I of the first half with pair I of the second half of every head.
  template <int I>
  __device__ __forceinline__ void rotate(const Target& target) {
    if (column_ >= target.q_columns + target.kv_columns) return;
    rotate_row<I>(upper_, target, upper_place_);
    rotate_row<I>(lower_, target, lower_place_);
  }
  template <int I>
  __device__ __forceinline__ void rotate_row(uint32_t (&pairs)[32], const Target& target,
                                             int place) {
    const float2 c = (target.cos + place)[4 * I], s = (target.sin + place)[4 * I];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (column_ + head * HeadDim >= target.q_columns + target.kv_columns) break;
      uint32_t& first = pairs[head * 2 * kHalf + I];
      uint32_t& second = pairs[head * 2 * kHalf + I + kHalf];
      const float a0 = low_half(first), a1 = high_half(first);
      const float b0 = low_half(second), b1 = high_half(second);
      first = bf16x2(a0 * c.x - b0 * s.x, a1 * c.y - b1 * s.y);
      second = bf16x2(b0 * c.x + a0 * s.x, b1 * c.y + a1 * s.y);
    }
  }

  // Stores columns 64 Block to 64 Block + 63 of this warp's 16 rows.
  template <int Block>
  __device__ __forceinline__ void store(const Target& target, uint32_t shared) {
    const int column = column_ + Block * 64;
    if (column >= target.columns()) return;
    const int thread = opaque(static_cast<int>(threadIdx.x)), lane = thread % 32;
    const uint32_t own = shared + (thread / 32 - 4) * kWarpBytes;
    // The 128-byte swizzle of the map: piece i of row r goes to place i ^ r % 8 of its 128 bytes.
    const uint32_t to_shared = own + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    gpu::bulk_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int pair = Block * 8 + i;
      gpu::store_matrices(to_shared ^ (i * 16), upper_[pair], lower_[pair], upper_[pair + 1],
                          lower_[pair + 1]);
    }
    // Queries are stored in qkv; keys and values too, unless there is a cache.
    if (target.cache_rows != nullptr && column >= target.q_columns) {
      store_in_cache(target, own, column, lane);
      return;
    }
    gpu::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      gpu::tensor_store(&target.qkv_map, column, row_, own);
      gpu::bulk_store_commit();
    }
  }

  // Copies the warp's 16 rows of 64 columns from shared memory to their rows of the cache.
  __device__ __forceinline__ void store_in_cache(const Target& target, uint32_t own, int column,
                                                 int lane) const {
    __syncwarp();
    const bool key = column < target.q_columns + target.kv_columns;
    __nv_bfloat16* to = (key ? target.keys : target.values) + column - target.q_columns -
                        (key ? 0 : target.kv_columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int within = i * 4 + lane / 8, row = row_ + within;
      const uint4 values =
          gpu::load_shared16(own + within * 128 + ((lane % 8) ^ (within % 8)) * 16);
      if (row < target.tokens) {
        *reinterpret_cast<uint4*>(to + target.cache_rows[row] * target.kv_columns + lane % 8 * 8) =
            values;
      }
    }
    __syncwarp();  // the next step overwrites the shared memory
  }

  uint32_t upper_[32];
  uint32_t lower_[32];
  int row_, column_;
  int upper_place_, lower_place_;  // offset of this lane's first pair in the tables
  int step_ = kSteps;
};

// A step of the epilogue is cold code and costs a k-step some of its slack, but past the last
// k-step nothing hides it. So steps either run in every other k-step or, where that leaves room for
// all, spread: in k-step kSpreadFirst and every kSpreadEvery-th after it.
constexpr int kSpreadFirst = 4, kSpreadEvery = 3;
// Whether `steps` steps all find a k-step.
constexpr bool may_spread(int steps, int k_steps) {
  return kSpreadFirst + kSpreadEvery * (steps - 1) < k_steps;
}

template <bool kBytes>
__device__ __forceinline__ void produce(const Operands& operands, const Target& target,
                                        const Ring& ring, uint32_t rank) {
  const TileOrder order{operands.m_pairs, operands.n_tiles, operands.group};
  const int clusters = gridDim.x / kCluster;
  Producer producer{ring, rank};
  ColumnScales column_scales(ring.gap);
  for (int tile = blockIdx.x / kCluster; tile < order.count(); tile += clusters) {
    const int row = (order.m_pair(tile) * kCluster + rank) * kTileM;
    if constexpr (kBytes) column_scales.request(producer, target.scales, order.n_tile(tile));
    producer.load<kStepColumns<kBytes>>(operands.map_a, row, operands.map_b, order.n_tile(tile),
                                        operands.k_steps);
  }
}

template <typename Epilogue, bool kBytes>
__device__ __forceinline__ void consume(const Operands& operands, const Target& target,
                                        const Ring& ring, uint32_t shared, uint32_t rank,
                                        int warpgroup) {
  using namespace gpu;
  const TileOrder order{operands.m_pairs, operands.n_tiles, operands.group};
  const int clusters = gridDim.x / kCluster;
  float acc[128];
  Epilogue pending;
  RingCursor<kStages> cursor;
  ColumnScales column_scales(ring.gap);
  // One round more than tiles, without k-steps, runs the last tile's epilogue.
  for (int tile = blockIdx.x / kCluster;; tile += clusters) {
    const int k_steps = tile < order.count() ? operands.k_steps : 0;
    const auto first_row = [&] {
      return (order.m_pair(tile) * kCluster + rank) * kTileM + warpgroup * 64;
    };
    float upper = 0.0f, lower = 0.0f;  // scales of this lane's rows
    if (kBytes && k_steps > 0) {
      const int row = first_row() + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      upper = target.scales.of_row(row), lower = target.scales.of_row(row + 8);
    }
    int previous = 0;
    for (int k = 0; k < k_steps || !pending.done(); ++k) {
      if (k < k_steps) {
        barrier_wait(ring.full + cursor.stage * 8, cursor.parity);
        const uint32_t stage = ring.stages + cursor.stage * kStageBytes;
        multiply_step<kTileN, kBytes>(acc, stage + warpgroup * (kBytesA / 2), stage + kBytesA,
                                      k > 0);
      }
      if (k > 0 && k < k_steps) {
        wgmma_wait<1>();
        release(ring, previous);
      }
      if (k < k_steps) {
        previous = cursor.stage;
        cursor.advance();
      }
      const bool now = Epilogue::kSpread
                           ? k >= kSpreadFirst && k % kSpreadEvery == kSpreadFirst % kSpreadEvery
                           : k % 2 == 1 || k == 2;
      if (now || k >= k_steps) pending.advance(target, shared);
    }
    if (k_steps == 0) break;
    wgmma_wait<0>();
    release(ring, previous);
    if constexpr (kBytes) wgmma_hold(acc);
    pending.template take<kBytes>(acc, upper, lower, column_scales, first_row(),
                                  order.n_tile(tile));
    if constexpr (kBytes) column_scales.advance();
  }
  pending.finish();
}

// Between the ring buffer's stages and its barriers: scales, then what tiles are stored through.
template <typename Tile, bool kBytes>
constexpr uint32_t kGapBytes = Tile::kSharedBytes + (kBytes ? ColumnScales::kBytes : 0);

template <int HeadDim, bool Spread, bool kBytes>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    qkv_sm90_kernel(const __grid_constant__ Operands operands,
                    const __grid_constant__ Target target) {
  extern __shared__ uint8_t memory[];
  using namespace gpu;
  using Tile = RotatedTile<HeadDim, Spread>;
  const Ring ring(memory, kGapBytes<Tile, kBytes>);
  const uint32_t shared = ring.gap + (kBytes ? ColumnScales::kBytes : 0);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&operands.map_a);
    prefetch_tensor_map(&operands.map_b);
    ring.init();
  }
  cluster_sync();
  run_roles([&] { produce<kBytes>(operands, target, ring, rank); },
            [&](int warpgroup) {
              consume<Tile, kBytes>(operands, target, ring, shared, rank, warpgroup);
            });
}

template <int HeadDim, bool Spread, bool kBytes>
cudaError_t launch(const Operands& operands, const Target& target, int ctas, cudaStream_t stream) {
  constexpr uint32_t kShared = kRingBytes + kGapBytes<RotatedTile<HeadDim, Spread>, kBytes>;
  const auto kernel = qkv_sm90_kernel<HeadDim, Spread, kBytes>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  kernel<<<ctas, kThreads, kShared, stream>>>(operands, target);
  return cudaGetLastError();
}

template <int HeadDim, bool kBytes>
cudaError_t launch(const Operands& operands, const Target& target, int ctas, cudaStream_t stream) {
  return may_spread(RotatedTile<HeadDim, true>::kSteps, operands.k_steps)
             ? launch<HeadDim, true, kBytes>(operands, target, ctas, stream)
             : launch<HeadDim, false, kBytes>(operands, target, ctas, stream);
}

// The product's operands: x [M, D] and w [columns, D].
Operands operands_of(const QkvCuda& problem, int64_t columns) {
  const int64_t rows = problem.rope.tokens;
  Operands operands{};
  const bool bytes = problem.in_bytes();
  operands.map_a =
      bytes ? gpu::byte_matrix_tensor_map(problem.x_bytes.values, rows, problem.width, kTileM)
            : gpu::matrix_tensor_map(problem.x, rows, problem.width, kTileM);
  operands.map_b =
      bytes ? gpu::byte_matrix_tensor_map(problem.w_bytes.values, columns, problem.width,
                                          kTileN / kCluster)
            : gpu::matrix_tensor_map(problem.w, columns, problem.width, kTileN / kCluster);
  operands.k_steps = static_cast<int>(ceil_div(problem.width, bytes ? 2 * kTileK : kTileK));
  operands.m_pairs = static_cast<int>(ceil_div(rows, kTileM * kCluster));
  operands.n_tiles = static_cast<int>(ceil_div(columns, kTileN));
  // 8 row tiles of 256 rows by 8 column tiles of 256 are about what 66 clusters run at one time: at
  // K = 2048 8 MiB of each, well inside the L2.
  operands.group = 8;
  return operands;
}

bool supported(const CudaContext& ctx, const QkvCuda& problem) {
  const RopeCuda& rope = problem.rope;
  return ctx.compute_capability() == 90 && (rope.head_dim == 64 || rope.head_dim == 128) &&
         rope.bias == nullptr && !rope.inverse && problem.width > 0 &&
         problem.width % (problem.in_bytes() ? 16 : 8) == 0 && rope.tokens < int64_t{1} << 30;
}

}  // namespace

bool qkv_is_fused(const CudaContext& ctx, const QkvCuda& problem) {
  return route::fused_qkv_pays(problem.rope.tokens) && supported(ctx, problem);
}

void qkv_cuda(CudaContext& ctx, const QkvCuda& problem) {
  const RopeCuda& rope = problem.rope;
  TWELL_CHECK(supported(ctx, problem), "fused projection of {} heads of {} from width {} on {}",
              rope.heads, rope.head_dim, problem.width, ctx.device_name());
  check_column_scales(problem.w_bytes.scales);
  if (rope.tokens == 0) return;
  const int64_t columns = (rope.heads + 2 * rope.kv_heads) * rope.head_dim;
  const Target target{
      .qkv_map = gpu::matrix_tensor_map(rope.qkv, rope.tokens, columns, kStoredRows),
      .cos = reinterpret_cast<const float2*>(rope.cos),
      .sin = reinterpret_cast<const float2*>(rope.sin),
      .positions = rope.positions,
      .cache_rows = rope.cache_rows,
      .qkv = rope.qkv,
      .keys = rope.keys,
      .values = rope.values,
      .tokens = static_cast<int>(rope.tokens),
      .q_columns = static_cast<int>(rope.heads * rope.head_dim),
      .kv_columns = static_cast<int>(rope.kv_heads * rope.head_dim),
      .scales = {problem.x_bytes.scales, problem.w_bytes.scales, static_cast<int>(rope.tokens),
                 static_cast<int>(columns)}};
  const Operands operands = operands_of(problem, columns);
  const int ctas =
      kCluster * std::min(ctx.multiprocessors() / kCluster, operands.m_pairs * operands.n_tiles);
  const auto launch_kernel = problem.in_bytes()
                                 ? (rope.head_dim == 64 ? launch<64, true> : launch<128, true>)
                                 : (rope.head_dim == 64 ? launch<64, false> : launch<128, false>);
  TWELL_CUDA_CHECK(launch_kernel(operands, target, ctas, ctx.stream()));
}

}  // namespace twell
