// SPDX-License-Identifier: Apache-2.0
// Times one feed-forward layer on the GPU on a given activation pattern: every execution against
// the dense one (cuBLASLt, the fastest algorithm it proposes) in the same run, after checking the
// results. Every measurement replays CUDA graphs; each round runs every execution once.
//
// Up to 2,048 tokens the layer's own gate produces the pattern (firing_columns), and the layer runs
// as the engine runs it. Passes rotate through copies of the weights that exceed the L2 cache
// together. For more tokens the up and down products run on the given pattern with random values,
// and the gate GEMM on random operands of the same mean activity, so that each is timed apart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/ffn_benchmark.h"
#include "twell/base/cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {

struct FfnCudaRow {
  std::string pattern;
  FfnExecution execution = FfnExecution::kDense;
  bool chosen = false;  // whether auto runs this execution
  std::string reason;   // why auto chose it
  int64_t tokens = 0;
  double nnz_per_token = 0.0;
  int64_t max_row_nnz = 0;
  double error = 0.0;                  // |y - y_dense| / |y_dense| (norms)
  Timing gate, up_down;                // ms, of the layer's two halves; zero where they are fused
  Timing layer;                        // ms
  double speedup = 1.0;                // dense median / this median
  double millijoules_per_token = 0.0;  // 0: not measured
};

struct FfnCudaBenchmark {
  FfnBenchmark layer;
  double energy_seconds = 1.0;  // measurement window per execution; 0: do not measure
};

// Rows: dense, tile-union and row-fused; for up to 2,048 tokens, dense and the sparse execution
// that the table has for them (ops/ffn/dispatch.h). Error when an execution differs from dense.
std::vector<FfnCudaRow> benchmark_ffn_cuda(CudaContext& ctx, const FfnCudaBenchmark& options,
                                           const FfnPattern& pattern);

}  // namespace twell
