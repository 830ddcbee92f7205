// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/cpu/ffn_cost.h"

#include <algorithm>

namespace twell {
namespace {

// Fitted to f32 timings at D 2048, F 5632 on a server core with AVX-512 and 2 MiB of L2 cache,
// where the unit, 4 D floating-point operations in a GEMM, is 0.042 us. A GEMM also streams each
// neuron's two weight rows, which with few tokens is all it does: 16 KiB at 25 GB/s.
constexpr double kDenseRow = 16.0;
// Row-fused streams the same rows for each pair.
constexpr double kRowFusedPair = 15.0;
// Tile-union streams them once per tile, with less help from the prefetcher; its pairs run at the
// speed of the L2 cache (0.2 to 0.25 us).
constexpr double kTileUnionPair = 6.0;
constexpr double kTileUnionRow = 25.0;

// A sparse cost must be below this share of the dense cost: a machine on which the constants are
// off by a fifth still loses nothing against dense.
constexpr double kCpuSparseShare = 0.8;

}  // namespace

double dense_cost(const FfnWork& work) {
  return static_cast<double>(work.ffn) * (static_cast<double>(work.tokens) + kDenseRow);
}

double row_fused_cost(const FfnWork& work) { return static_cast<double>(work.nnz) * kRowFusedPair; }

double tile_union_cost(const FfnWork& work) {
  return static_cast<double>(work.nnz) * kTileUnionPair +
         static_cast<double>(work.union_size) * kTileUnionRow;
}

bool surely_dense(const FfnWork& work) {
  // At best all tokens have the same neurons.
  FfnWork best = work;
  best.union_size = work.nnz / std::max<int64_t>(work.tokens, 1);
  return kCpuSparseShare * dense_cost(best) <=
         std::min(row_fused_cost(best), tile_union_cost(best));
}

FfnExecution cheapest_execution(const FfnWork& work) {
  const double dense = kCpuSparseShare * dense_cost(work);
  const double row_fused = row_fused_cost(work);
  const double tile_union = tile_union_cost(work);
  return dense <= std::min(row_fused, tile_union) ? FfnExecution::kDense : cheapest_sparse(work);
}

FfnExecution cheapest_sparse(const FfnWork& work) {
  return row_fused_cost(work) <= tile_union_cost(work) ? FfnExecution::kRowFused
                                                       : FfnExecution::kTileUnion;
}

}  // namespace twell
