// SPDX-License-Identifier: Apache-2.0
// Time and memory of whole training steps on the GPU: forward, backward, gradient norm and AdamW
// over one micro-batch of random tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "twell/base/cuda.h"
#include "twell/model/weights.h"
#include "twell/train/engine_cuda.h"

namespace twell {

struct TrainBenchmarkOptions {
  int64_t micro_batch = 8;
  int64_t length = 0;
  int64_t steps = 10;  // timed, after some that are not
  uint64_t seed = 0;
  std::optional<Recompute> recompute;  // as in TrainOptions, like the next
  DType moment_dtype = DType::kF32;
  bool tune = false;  // matrix products by a stopwatch (set_matmul_tuning)
  FfnTrainPolicy policy = FfnTrainPolicy::kDense;
  // Where the layers' activity is not their own, but replayed: what it is, and how.
  std::vector<LayerHint> hints;  // [L], or empty
  std::function<void(int64_t layer, FfnTrainForwardCuda& problem)> before_ffn = {};
};

struct TrainBenchmarkRun {
  double seconds = 0.0, p10 = 0.0, p90 = 0.0;  // of a step; the first is the median
  double tokens_per_second = 0.0;
  double mfu = 0.0;                             // 0 where the device's peak is not known
  int64_t device_bytes = 0;                     // taken by the step, plans and workspaces included
  std::map<std::string, double> stage_seconds;  // of one step, run without a graph
  std::vector<LayerMetrics> layers;             // [L] of the last step
  double ce = 0.0;                              // of the last step
};

// On a context of its own, so that memory is counted from nothing. The model is not changed.
TrainBenchmarkRun benchmark_training(cudaStream_t stream, Model& model,
                                     const TrainBenchmarkOptions& options);

// The largest micro-batch whose plan fits into the memory that is free, at least 1 (which may not
// fit); where recomputation is automatic, with all there is.
int64_t largest_micro_batch(cudaStream_t stream, const ModelConfig& config,
                            TrainBenchmarkOptions options);

}  // namespace twell
