// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/ffn_cost.h"

#include <algorithm>

namespace twell {
namespace {

// Fitted to f32 timings at D 2048, F 5632 on an AVX-512 server core; see docs/numerics of the op
// benchmark for the runs. A GEMM streams each neuron's weight rows once, which with few tokens
// is all it does: the time of about 25 pairs.
constexpr double kDenseRow = 25.0;
// A sparse pair: one dot product and one row addition at the speed of the L2 and L3 caches.
constexpr double kRowFusedPair = 8.0;
constexpr double kTileUnionPair = 5.0;
constexpr double kTileUnionRow = 12.0;

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
  FfnWork best = work;
  best.union_size = 0;
  return dense_cost(best) <= std::min(row_fused_cost(best), tile_union_cost(best));
}

FfnExecution cheapest_execution(const FfnWork& work) {
  const double dense = dense_cost(work);
  const double row_fused = row_fused_cost(work);
  const double tile_union = tile_union_cost(work);
  if (dense <= std::min(row_fused, tile_union)) return FfnExecution::kDense;
  return row_fused <= tile_union ? FfnExecution::kRowFused : FfnExecution::kTileUnion;
}

}  // namespace twell
