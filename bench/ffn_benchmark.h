// SPDX-License-Identifier: Apache-2.0
// Times ffn_forward on a given activation pattern, every execution against dense in the same run.
//
// The layer's own gate produces the pattern: x has orthonormal rows, and w_gate solves x w_gate^T =
// G for a G with the pattern's signs. This requires tokens <= width.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/patterns.h"
#include "twell/base/context.h"
#include "twell/ops/ffn/ffn.h"

namespace twell {

struct FfnBenchmark {
  int64_t width = 2048;
  int64_t ffn = 5632;
  bool gated = true;
  Activation activation = Activation::kRelu;  // or kRelu2
  int repeats = 11;                           // rounds, each running every execution once
  uint64_t seed = 1;
};

struct FfnBenchmarkRow {
  std::string pattern;
  FfnPolicy policy = FfnPolicy::kDense;
  FfnExecution execution = FfnExecution::kDense;  // the execution that the policy chose
  int64_t tokens = 0;
  double nnz_per_token = 0.0;
  int64_t max_row_nnz = 0;
  double error = 0.0;    // largest |y - y_dense| / |y_dense| (norms) of any token
  Timing time;           // seconds
  double speedup = 1.0;  // median over the rounds of dense time / this time
};
// One row per policy: dense, row-fused, tile-union, auto. Error when an execution differs from the
// dense result or the gate from the pattern; InputError for a pattern that does not fit the layer.
std::vector<FfnBenchmarkRow> benchmark_ffn(Context& ctx, const FfnBenchmark& options,
                                           const FfnPattern& pattern);

}  // namespace twell
