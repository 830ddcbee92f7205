// SPDX-License-Identifier: Apache-2.0
// A sweep over shapes, numbers of tokens and activity that shows where the plan of a feed-forward
// layer on a GPU is wrong: for each case the dense layer (cuBLASLt, the fastest algorithm it
// proposes), the sparse execution for so many tokens, and what `auto` runs, in one run.
//
// The gate fires as wanted without solving for weights:
//   random activity     x[:, 0] = 1 and w_gate[:, 0] is a bias, so that a gate of standard
//   deviation
//                       s fires where a normal value exceeds -bias / s
//   a captured pattern  token m has 32 in column m mod P of its first P columns and 0 in the
//   others,
//                       and w_gate[n, m mod P] is 0.5 where neuron n is active on that token, -0.5
//                       elsewhere; the random rest is below an eighth of the 16 this gives. Tokens
//                       repeat after P = min(D / 2, 1024).
// Several copies of small weights take turns, so that none stays in the L2 cache.
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
  std::vector<FfnPattern> captured;  // of captured_ffn neurons, stretched to each F
  int64_t captured_ffn = 0;
  bool gated = true;
  int rounds = 5;
  uint64_t seed = 1;
};

// The published list, or a tenth of it for a first look. Captured patterns are the caller's.
FfnSweep default_ffn_sweep(bool quick);
int64_t case_count(const FfnSweep& sweep);

struct FfnSweepRow {
  FfnSweepShape shape;
  int64_t tokens = 0;
  bool gated = true;
  std::string pattern;
  LayerActivity activity;                                 // as the plan sees it
  FfnExecution sparse = FfnExecution::kTileUnion;         // that was timed
  FfnExecution chosen = FfnExecution::kDense;             // by auto
  double dense_us = 0.0, sparse_us = 0.0, auto_us = 0.0;  // medians
  double dense_estimate_us = 0.0, sparse_estimate_us = 0.0;
  double error = 0.0;  // |y - y_dense| / |y_dense| of what the sparse execution gave, on 256 rows
};

// Calls on_row after each case. A shape whose operands do not fit into the device's memory is left
// out and named in the result. Error where a sparse execution does not give the dense result.
std::vector<std::string> sweep_ffn_cuda(CudaContext& ctx, const FfnSweep& sweep,
                                        const std::function<void(const FfnSweepRow&)>& on_row);

}  // namespace twell
