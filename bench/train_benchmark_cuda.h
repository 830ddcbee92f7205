// SPDX-License-Identifier: Apache-2.0
// Time and memory of whole training steps on the GPU: forward, backward, gradient norm and AdamW
// over one micro-batch of random tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/harness_cuda.h"
#include "twell/model/weights.h"
#include "twell/train/engine_cuda.h"

namespace twell {

struct TrainBenchmarkOptions {
  int64_t micro_batch = 8;
  int64_t length = 0;
  int64_t steps = 10;  // timed, after three that are not
  uint64_t seed = 0;
  std::optional<Recompute> recompute;  // this and the next as in TrainOptions
  DType moment_dtype = DType::kF32;
  bool tune = false;  // matrix products by a stopwatch (set_matmul_tuning)
  FfnTrainPolicy policy = FfnTrainPolicy::kDense;
  // For replayed patterns: their activity, and a function that puts them into a layer's problem.
  std::vector<LayerHint> hints;  // [L], or empty
  std::function<void(int64_t layer, FfnTrainForwardCuda& problem)> before_ffn = {};
};

struct TrainBenchmarkRun {
  Timing step;  // seconds
  double tokens_per_second = 0.0;
  double mfu = 0.0;                             // 0 where the device's peak is not known
  int64_t device_bytes = 0;                     // of the step, plans and workspaces included
  std::map<std::string, double> stage_seconds;  // of one step, run without a graph
  std::vector<LayerMetrics> layers;             // [L] of the last step
  double ce = 0.0;                              // of the last step
};

// Runs on a context of its own, so that memory is counted from zero. The model is not changed.
TrainBenchmarkRun benchmark_training(cudaStream_t stream, Model& model,
                                     const TrainBenchmarkOptions& options);

// The largest micro-batch whose plan fits into the free memory, with the most recomputation where
// that is automatic; at least 1, which may not fit.
int64_t largest_micro_batch(cudaStream_t stream, const ModelConfig& config,
                            TrainBenchmarkOptions options);

}  // namespace twell
