// SPDX-License-Identifier: Apache-2.0
// Which execution of a feed-forward layer a GPU runs, from measured activity: a model of operations
// and bytes, not a stopwatch, so that the choice repeats. Plain arithmetic, needs no GPU.
#pragma once

#include <cstdint>
#include <string>

#include "twell/ops/ffn/ffn.h"

namespace twell {

struct GpuLayerShape {
  int64_t width = 0;  // D
  int64_t ffn = 0;    // F
  bool gated = true;
  int64_t multiprocessors = 132;
  bool hopper = true;  // compute capability 9.0
};

// Averages over the calls so far.
struct LayerActivity {
  double nnz_per_token = -1.0;  // negative: nothing measured yet
  double union_share = -1.0;    // union of a tile of 128 tokens over F; negative: not measured
  double extra_tiles = 0.0;     // tiles of heavy rows, per tile of 128 tokens
  int64_t max_row_nnz = 0;
};

// Largest number of tokens that the few-token form of row-fused takes.
inline constexpr int64_t kFewTokens = 64;

// Estimated microseconds on one H200; other GPUs differ in scale more than in ratio.
double gpu_dense_cost(const GpuLayerShape& shape, int64_t tokens);
double gpu_row_fused_cost(const GpuLayerShape& shape, int64_t tokens,
                          const LayerActivity& activity);
double gpu_tile_union_cost(const GpuLayerShape& shape, int64_t tokens,
                           const LayerActivity& activity);

struct GpuChoice {
  FfnExecution execution = FfnExecution::kDense;
  std::string reason;  // one line with the numbers
};
// Before anything is measured: a sparse execution, which measures what dense cannot.
GpuChoice choose_gpu_execution(const GpuLayerShape& shape, int64_t tokens, FfnPolicy policy,
                               const LayerActivity& activity);

}  // namespace twell
