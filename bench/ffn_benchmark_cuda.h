// SPDX-License-Identifier: Apache-2.0
// Times one feed-forward layer on the GPU on a given activation pattern: every execution against
// the dense one (cuBLASLt, the fastest algorithm it proposes) in the same run, after checking the
// results. Every measurement replays CUDA graphs; each round runs every execution once.
//
// Up to 2,048 tokens the layer's own gate produces the pattern (firing_columns), and the layer runs
// as the engine runs it. Passes rotate through copies of the weights that exceed the L2 cache
// together. For more tokens the up and down products run on the given pattern with random values,
// and the gate GEMM on random operands of the same mean activity, so that each is timed apart.
//
// The dense layer is also timed with 8-bit products (bench/dense_8bit_cuda.h): its weights are
// quantised before, x and h within the time. The error of these rows is that of a layer as active
// on normal x and weights, and of at most 256 tokens: the operands timed have a few columns much
// larger than the others, which make neurons fire as wanted and would take up most of the steps of
// int8. For more tokens tile-union is timed in fp8 too, as the engine runs it: x is quantised, and
// in a layer without a gate w_down widened, within the time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/dense_8bit_cuda.h"
#include "bench/ffn_benchmark.h"
#include "twell/base/cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {

struct FfnCudaRow {
  std::string pattern;
  FfnExecution execution = FfnExecution::kDense;
  std::optional<Dense8Bit> eight_bit;  // of a dense execution, or of tile-union, in fp8 alone
  std::string arithmetic;              // of an 8-bit one
  bool chosen = false;                 // whether auto runs this execution
  std::string reason;                  // why auto chose it
  int64_t tokens = 0;
  double nnz_per_token = 0.0;
  int64_t max_row_nnz = 0;
  double error = 0.0;                  // |y - y_dense| / |y_dense| (norms), y_dense in bf16
  Timing gate, up_down;                // ms, of the layer's two halves; zero where they are fused
  Timing layer;                        // ms
  double speedup = 1.0;                // dense median / this median
  double millijoules_per_token = 0.0;  // 0: not measured

  std::string_view name() const {
    if (!eight_bit) return execution.name;
    return execution.sparse ? "tile-union-fp8" : dense_8bit_name(*eight_bit);
  }
};

struct FfnCudaBenchmark {
  FfnBenchmark layer;
  double energy_seconds = 1.0;  // measurement window per execution; 0: do not measure
};

struct FfnCudaResult {
  std::vector<FfnCudaRow> rows;
  std::vector<std::string> left_out;  // 8-bit executions that cannot run, each with the reason
};

// Rows: dense, tile-union, row-fused and portable-union, or for up to 2,048 tokens dense and the
// sparse execution that the table has for them (ops/ffn/dispatch.h); then dense in 8 bits. Error
// when a sparse execution differs from dense, or an 8-bit result is not finite.
FfnCudaResult benchmark_ffn_cuda(CudaContext& ctx, const FfnCudaBenchmark& options,
                                 const FfnPattern& pattern);

}  // namespace twell
