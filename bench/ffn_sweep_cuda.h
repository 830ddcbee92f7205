// SPDX-License-Identifier: Apache-2.0
// A sweep over shapes, numbers of tokens and activity that shows where the plan of a feed-forward
// layer on a GPU is wrong. Each case times, in one run, the dense layer (cuBLASLt, the fastest
// algorithm it proposes), the sparse execution for that many tokens, and what `auto` runs.
//
// The inputs produce the activity without solving for weights:
// Random activity: x[:, 0] = 1 and w_gate[:, 0] is a bias; a gate of standard deviation s is active
// where a standard normal value exceeds -bias / s.
// Captured pattern: token m has 32 in column m mod P of its first P columns and 0 in the others;
// w_gate[n, m mod P] is 0.5 where neuron n is active on that token, else -0.5. The random other
// columns add less than an eighth of 32 * 0.5 = 16. Tokens repeat after P = min(D / 2, 1024).
// Small weights have several copies that are used in turn, so that none stays in the L2 cache.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/ffn_benchmark.h"
#include "twell/base/cuda.h"
#include "twell/ops/ffn/ffn_cuda.h"

namespace twell {

struct FfnSweepShape {
  int64_t width = 0;  // D
  int64_t ffn = 0;    // F
};

struct FfnSweep {
  std::vector<FfnSweepShape> shapes;
  std::vector<int64_t> tokens;       // M
  std::vector<double> densities;     // of random activity, 0 to 1
  std::vector<FfnPattern> captured;  // of captured_ffn neurons; stretched to each F
  int64_t captured_ffn = 0;
  bool gated = true;
  int rounds = 5;
  uint64_t seed = 1;
};

// The sweep of the published results, or a tenth of it (`quick`). The caller adds captured
// patterns.
FfnSweep default_ffn_sweep(bool quick);
int64_t case_count(const FfnSweep& sweep);

struct FfnSweepRow {
  FfnSweepShape shape;
  int64_t tokens = 0;
  bool gated = true;
  std::string pattern;
  LayerActivity activity;                                 // as given to the plan
  FfnExecution sparse = FfnExecution::kTileUnion;         // the sparse execution timed
  FfnExecution chosen = FfnExecution::kDense;             // the execution auto chose
  double dense_us = 0.0, sparse_us = 0.0, auto_us = 0.0;  // medians
  double dense_estimate_us = 0.0, sparse_estimate_us = 0.0;
  double error = 0.0;  // |y - y_dense| / |y_dense| of the sparse execution, on up to 256 rows
};

// Calls on_row after each case. Returns the names of shapes that were skipped because their
// operands do not fit into device memory. Error when a sparse execution differs from the dense
// result.
std::vector<std::string> sweep_ffn_cuda(CudaContext& ctx, const FfnSweep& sweep,
                                        const std::function<void(const FfnSweepRow&)>& on_row);

}  // namespace twell
