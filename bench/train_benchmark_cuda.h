// SPDX-License-Identifier: Apache-2.0
// Time and memory of whole training steps on the GPU: forward, backward, gradient norm and AdamW
// for one micro-batch of random tokens, or one per rank.
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
  int64_t steps = 10;  // timed steps, after three warm-up steps
  uint64_t seed = 0;
  std::optional<Recompute> recompute;  // as in TrainOptions, like moment_dtype
  DType moment_dtype = DType::kF32;
  DType gradient_dtype = DType::kF32;
  bool document_mask = false;     // of random documents, about 600 tokens long
  Communicator* ranks = nullptr;  // null for a single GPU; all ranks call benchmark_training
  bool tune = false;              // choose matmul algorithms by timing (set_matmul_tuning)
  FfnTrainPolicy policy = FfnTrainPolicy::kDense;
  // For replayed patterns: their activity, and a function that puts a pattern into a layer's
  // problem.
  std::vector<LayerHint> hints;  // [L], or empty
  std::function<void(int64_t layer, FfnTrainForwardCuda& problem)> before_ffn = {};
};

struct TrainBenchmarkRun {
  Timing step;                     // seconds
  double tokens_per_second = 0.0;  // of all ranks
  double mfu = 0.0;                // 0 when the device's peak is unknown
  int64_t device_bytes = 0;        // used by the step, including plans and workspaces
  // The parts of one step without a CUDA graph. With several ranks it also has their collective
  // calls, which run beside the other parts.
  std::map<std::string, double> stage_seconds;
  std::vector<LayerMetrics> layers;  // [L], of the last step
  double ce = 0.0;                   // of the last step
};

// Runs in a new context, so that device_bytes counts from zero. The model is not changed.
TrainBenchmarkRun benchmark_training(cudaStream_t stream, Model& model,
                                     const TrainBenchmarkOptions& options);

// The largest micro-batch whose plan fits into free memory, with the most recomputation where that
// is automatic; at least 1, even if that does not fit.
int64_t largest_micro_batch(cudaStream_t stream, const ModelConfig& config,
                            TrainBenchmarkOptions options);

}  // namespace twell
