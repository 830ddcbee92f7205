// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twell/base/rounding.h"
#include "twell/ops/matmul/paired_gemm_sm90.h"
#include "twell/sm90/tensor_map.h"

namespace twell::paired_gemm {
Operands make_operands(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t rows, int64_t cols,
                       int64_t inner) {
  Operands operands{};
  operands.map_a = sm90::matrix_tensor_map(a, rows, inner, kTileM);
  operands.map_b = sm90::matrix_tensor_map(b, cols, inner, kTileN / kCluster);
  operands.k_steps = static_cast<int>(ceil_div(inner, kTileK));
  operands.m_pairs = static_cast<int>(ceil_div(rows, kTileM * kCluster));
  operands.n_tiles = static_cast<int>(ceil_div(cols, kTileN));
  // 8 row tiles of 256 rows by 8 column tiles of 256 are about what 66 clusters run at one time: at
  // K = 2048 8 MiB of each, well inside the L2.
  operands.group = 8;
  return operands;
}

int ctas(const Operands& operands, int multiprocessors) {
  return kCluster * std::min(multiprocessors / kCluster, operands.m_pairs * operands.n_tiles);
}

}  // namespace twell::paired_gemm
