// SPDX-License-Identifier: Apache-2.0
// What the host side passes to a kernel of paired_gemm_sm90.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace twell::paired_gemm {

inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;  // 128 bytes, the widest swizzle
inline constexpr int kCluster = 2;

struct Operands {
  CUtensorMap map_a;  // [M, K], boxes of kTileM rows
  CUtensorMap map_b;  // [N, K], boxes of kTileN / kCluster rows
  int k_steps;        // ceil(K / kTileK)
  int m_pairs;        // cluster tiles along M
  int n_tiles;        // along N
  int group;          // cluster tiles along M that share a sweep over N, for L2 reuse
};

// Operands for a [M, K] and b [N, K], row-major bf16 in device memory, 16-byte aligned, K a
// multiple of 8. Throws Error.
Operands make_operands(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t rows, int64_t cols,
                       int64_t inner);
// CTAs to launch: at most one per SM.
int ctas(const Operands& operands, int multiprocessors);

}  // namespace twell::paired_gemm
