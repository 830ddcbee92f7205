// SPDX-License-Identifier: Apache-2.0
// The projection's kernel: paired_gemm_sm90.cuh with an epilogue that rotates queries and keys in
// registers and stores all three.
#include "twell/ops/matmul/paired_gemm_sm90.cuh"
#include "twell/ops/qkv/qkv_cuda.h"
#include "twell/sm90/bf16_pair.cuh"
#include "twell/sm90/warp_mma.cuh"

namespace twell::qkv {
namespace {

using sm90::bf16x2;
using sm90::high_half;
using sm90::low_half;
using sm90::opaque;

// The epilogue: 64 tokens by 256 columns of a warpgroup, as pairs of bf16. Lane 4g + t of warp w
// holds columns 8i + 2t and 8i + 2t + 1 of rows 16w + g (upper) and 16w + g + 8 (lower) as pair i.
// A lane thus has both halves of every head and can rotate them by itself. Its steps:
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
  using Target = qkv::Target;
  static constexpr bool kSpread = Spread;
  static constexpr int kSteps = 1 + kHalf + 4;
  static constexpr uint32_t kSharedBytes = 8 * kWarpBytes;

  __device__ __forceinline__ void take(const float (&acc)[128], int first_row, int column_tile) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      upper_[i] = bf16x2(acc[4 * i], acc[4 * i + 1]);
      lower_[i] = bf16x2(acc[4 * i + 2], acc[4 * i + 3]);
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
  __device__ __forceinline__ void finish() const { sm90::bulk_store_wait(); }

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
    sm90::bulk_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int pair = Block * 8 + i;
      sm90::store_matrices(to_shared ^ (i * 16), upper_[pair], lower_[pair], upper_[pair + 1],
                           lower_[pair + 1]);
    }
    // Queries are stored in qkv; keys and values too, unless there is a cache.
    if (target.cache_rows != nullptr && column >= target.q_columns) {
      store_in_cache(target, own, column, lane);
      return;
    }
    sm90::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      sm90::tensor_store(&target.qkv_map, column, row_, own);
      sm90::bulk_store_commit();
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
          sm90::load_shared16(own + within * 128 + ((lane % 8) ^ (within % 8)) * 16);
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

template <int HeadDim, bool Spread>
__global__ void __cluster_dims__(paired_gemm::kCluster, 1, 1)
    __launch_bounds__(paired_gemm::kThreads, 1)
        qkv_sm90_kernel(const __grid_constant__ paired_gemm::Operands operands,
                        const __grid_constant__ Target target) {
  extern __shared__ uint8_t memory[];
  paired_gemm::run<RotatedTile<HeadDim, Spread>>(operands, target, memory);
}

template <int HeadDim, bool Spread>
cudaError_t launch(const paired_gemm::Operands& operands, const Target& target, int ctas,
                   cudaStream_t stream) {
  constexpr uint32_t kShared = paired_gemm::kRingBytes + RotatedTile<HeadDim, Spread>::kSharedBytes;
  const cudaError_t status = cudaFuncSetAttribute(
      qkv_sm90_kernel<HeadDim, Spread>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  qkv_sm90_kernel<HeadDim, Spread>
      <<<ctas, paired_gemm::kThreads, kShared, stream>>>(operands, target);
  return cudaGetLastError();
}

template <int HeadDim>
cudaError_t launch(const paired_gemm::Operands& operands, const Target& target, int ctas,
                   cudaStream_t stream) {
  return paired_gemm::may_spread(RotatedTile<HeadDim, true>::kSteps, operands.k_steps)
             ? launch<HeadDim, true>(operands, target, ctas, stream)
             : launch<HeadDim, false>(operands, target, ctas, stream);
}

}  // namespace

cudaError_t launch_qkv_sm90(const paired_gemm::Operands& operands, const Target& target,
                            int head_dim, int ctas, cudaStream_t stream) {
  if (head_dim == 64) return launch<64>(operands, target, ctas, stream);
  if (head_dim == 128) return launch<128>(operands, target, ctas, stream);
  return cudaErrorInvalidValue;
}

}  // namespace twell::qkv
