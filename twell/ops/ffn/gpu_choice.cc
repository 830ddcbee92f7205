// SPDX-License-Identifier: Apache-2.0
#include "twell/ops/ffn/gpu_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace twell {
namespace {

// One H200, in microseconds (docs/kernels.md has the measurements they are fitted to).
constexpr double kDenseFlops = 800e6;  // operations per us of a large bf16 GEMM
constexpr double kUnionFlops = 560e6;  // of the two GEMMs with gathered weight rows
constexpr double kBytes = 4.0e6;       // bytes per us of device memory
constexpr double kKernel = 3.0;        // a kernel too small to fill the device
constexpr double kPacking = 1.07;      // gate GEMM that packs, against one that does not
constexpr double kSpilling = 0.15;     // more of it when every tile spills
constexpr double kTileTokens = 128.0;

double gemm(const GpuLayerShape& shape, double tokens) {
  const double d = static_cast<double>(shape.width), f = static_cast<double>(shape.ffn);
  // Below a few hundred tokens a GEMM reads its weight and little else.
  return std::max(2.0 * tokens * d * f / kDenseFlops, 2.0 * d * f / kBytes) + kKernel;
}

// Share of a tile of tokens that neurons of one token's density would make if they fired
// independently: what a union is at most.
double independent_union(const GpuLayerShape& shape, const LayerActivity& activity) {
  const double density = activity.nnz_per_token / static_cast<double>(shape.ffn);
  return 1.0 - std::pow(1.0 - std::min(density, 1.0), kTileTokens);
}

double packed_gate(const GpuLayerShape& shape, double tokens, const LayerActivity& activity) {
  const double density = activity.nnz_per_token / static_cast<double>(shape.ffn);
  return gemm(shape, tokens) * (kPacking + kSpilling * std::min(1.0, density));
}

}  // namespace

double gpu_dense_cost(const GpuLayerShape& shape, int64_t tokens) {
  const double m = static_cast<double>(tokens), f = static_cast<double>(shape.ffn);
  if (!shape.gated) return 2.0 * gemm(shape, m);
  return 3.0 * gemm(shape, m) + 3.0 * 2.0 * m * f / kBytes + kKernel;
}

double gpu_tile_union_cost(const GpuLayerShape& shape, int64_t tokens,
                           const LayerActivity& activity) {
  const double m = static_cast<double>(tokens), d = static_cast<double>(shape.width);
  const double f = static_cast<double>(shape.ffn);
  const double share =
      activity.union_share >= 0.0 ? activity.union_share : independent_union(shape, activity);
  const double tiles = std::ceil(m / kTileTokens);
  // Unions are worked on in blocks of 64 neurons.
  const double neurons = share * f + 32.0;
  const double products = shape.gated ? 2.0 : 1.0;
  const double multiply = products * 2.0 * tiles * kTileTokens * neurons * d / kUnionFlops;
  const double move = products * 2.0 * m * d / kBytes + 2.0 * 2.0 * m * neurons / kBytes;
  return packed_gate(shape, m, activity) + std::max(multiply, move) + 6.0 * kKernel;
}

double gpu_row_fused_cost(const GpuLayerShape& shape, int64_t tokens,
                          const LayerActivity& activity) {
  const double m = static_cast<double>(tokens), d = static_cast<double>(shape.width);
  const double density = activity.nnz_per_token / static_cast<double>(shape.ffn);
  const double products = shape.gated ? 2.0 : 1.0;
  const double active = static_cast<double>(shape.ffn) * (1.0 - std::pow(1.0 - density, m));
  return 2.0 * d * (static_cast<double>(shape.ffn) + products * active) / kBytes + 2.0 * kKernel;
}

GpuChoice choose_gpu_execution(const GpuLayerShape& shape, int64_t tokens, FfnPolicy policy,
                               const LayerActivity& activity) {
  if (!shape.hopper) return {FfnExecution::kDense, "no sparse execution for this GPU"};
  if (policy == FfnPolicy::kDense) return {FfnExecution::kDense, "set by the caller"};
  if (policy != FfnPolicy::kAuto) return {FfnExecution::kTileUnion, "set by the caller"};
  if (activity.nnz_per_token < 0.0) {
    return {FfnExecution::kTileUnion, "nothing measured yet"};
  }
  const double dense = gpu_dense_cost(shape, tokens);
  const double tile_union = gpu_tile_union_cost(shape, tokens, activity);
  return {tile_union < dense ? FfnExecution::kTileUnion : FfnExecution::kDense,
          fmt::format("{:.1f} of {} neurons active per token, union of 128 tokens {:.0f}: "
                      "tile-union estimated at {:.2f} of dense",
                      activity.nnz_per_token, shape.ffn,
                      std::max(activity.union_share, 0.0) * static_cast<double>(shape.ffn),
                      tile_union / dense)};
}

}  // namespace twell
